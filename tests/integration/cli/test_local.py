"""Models served in the process of a command."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = (sys.executable, "-m", "agentjet.cli.main")
AGENT = """
from openai import AsyncOpenAI

def tasks():
    return [{"word": "one"}, {"word": "two"}]

async def run(task, policy):
    client = AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key)
    messages = [{"role": "user", "content": task["word"]}]
    reply = await client.chat.completions.create(model=policy.model, messages=messages, **policy.sampling)
    policy.log({"role": "assistant", "content": reply.choices[0].message.content})
    return {"reward": 1.0, "metrics": {"num_tokens": float(reply.usage.completion_tokens)}}
"""
SWARM = """
[models.policy]
path = "tiny"
[pools.words]
workflow = "agent.py:run"
tasks = "agent.py:tasks"
[eval]
pool = "words"
sampling = { temperature = 0.0, max_tokens = 3 }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "swarm.toml").write_text(SWARM)
    return tmp_path


def printed(folder: Path, *words: str) -> dict:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*COMMAND, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_one_task_against_a_model_served_here_shows_its_tokens(folder):
    words = ("rollout", "--once", "--dry-run", "agent.py", "--model", "tiny", "--max-tokens", "4", "--json")
    shown = printed(folder, *words)
    assert (shown["task"], shown["reward"]) == ({"word": "one"}, 1.0)
    (call,) = shown["calls"]
    assert len(call["completion_ids"]) == len(call["logprobs"]) == call["completion_tokens"] > 0
    assert shown["metrics"]["num_tokens"] == call["completion_tokens"]
    assert "<|im_start|>user\none<|im_end|>" in call["prompt"]
    assert call["message"]["content"].strip() in call["reply"]


@pytest.mark.slow
def test_eval_plays_the_tasks_and_is_the_same_each_time(folder):
    first = printed(folder, "eval", "tiny", "--repeats", "2", "--json")
    assert (first["model"], first["num_episodes"], first["num_scored"], first["reward_mean"]) == ("policy", 4, 4, 1.0)
    assert first == printed(folder, "eval", "tiny", "--repeats", "2", "--json")


def test_interrupt_while_a_command_waits_is_quiet_and_130(tmp_path):
    words = [*COMMAND, "status", "--nats", "nats://127.0.0.1:1"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        time.sleep(2)  # it tries to connect for ten seconds
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, b"")

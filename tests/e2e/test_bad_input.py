"""What a user gets wrong ends in one clear sentence and exit code 1, without a traceback."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

from agentjet.bus.server import EmbeddedServer

AGENTJET = str(Path(sys.executable).with_name("agentjet"))
AGENT = """
from openai import AsyncOpenAI

async def run(task, policy):
    client = AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key)
    await client.chat.completions.create(model=policy.model, messages=[{"role": "user", "content": "hi"}], max_tokens=1)
    return 1.0
"""
CONFIG = """
[run]
dir = "run"
num_steps = 1
[nats]
{nats}
[streams]
{streams}
[models.small]
path = "{model}"
[models.small.learner]
batch_groups = 1
{learner}
[pools.talk]
workflow = "agent.py:run"
tasks = "tasks.jsonl"
group_size = 2
"""


def write(folder: Path, *, agent: str = AGENT, tasks: str = '{"a": 1}\n', **parts: str) -> Path:
    values = {"nats": "", "streams": "", "model": "tiny", "learner": ""} | parts
    (folder / "agent.py").write_text(agent)
    (folder / "tasks.jsonl").write_text(tasks)
    (folder / "swarm.toml").write_text(CONFIG.format(**values))
    return folder / "swarm.toml"


def complaint(config: Path, *words: str, seconds: float = 60.0) -> str:
    """What `agentjet up` says when it gives up; it must do so by itself."""
    process = subprocess.Popen(
        [AGENTJET, *words, "up", "--config", str(config)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        _, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        raise AssertionError(f"it did not give up: {process.communicate(timeout=30)}") from None
    assert process.returncode == 1, stderr
    assert "Traceback" not in stderr
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("agentjet: ")
    return last


def test_a_missing_model_is_named_with_what_there_is(tmp_path: Path):
    assert "'nowhere' is neither a folder" in complaint(write(tmp_path, model="nowhere"))


def test_a6_an_agent_that_raises_on_import_is_named_with_its_own_message(tmp_path: Path):
    said = complaint(write(tmp_path, agent="raise RuntimeError('no tool server')"))
    assert "agent.py" in said and "no tool server" in said


def test_a_broken_line_of_a_task_file_is_named(tmp_path: Path):
    said = complaint(write(tmp_path, tasks='{"a": 1}\n{"a": \n'))
    assert "tasks.jsonl" in said and "line 2" in said


def test_a_port_in_use_is_named(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} is in use" in complaint(write(tmp_path, nats=f"port = {port}"))


def test_a_server_that_is_gone_is_named(tmp_path: Path):
    assert "no NATS server answers" in complaint(write(tmp_path, nats='url = "nats://127.0.0.1:9"'))


async def test_a_server_that_refuses_the_credentials_is_named(tmp_path: Path):
    async with EmbeddedServer(tmp_path / "nats", max_store_bytes=2**30, token="right") as server:
        said = complaint(write(tmp_path, nats=f'url = "{server.url}"\ntoken = "wrong"'))
    assert "refuses the credentials" in said


def test_a_store_that_is_too_small_for_the_streams_is_named(tmp_path: Path):
    said = complaint(write(tmp_path, nats="store_gib = 0.01", streams="max_gib = 1.0"))
    assert "store_gib" in said or "storage" in said


def test_a_misspelt_key_comes_with_its_line_and_the_nearest_one(tmp_path: Path):
    said = complaint(write(tmp_path, learner="learing_rate = 0.1"))
    assert "did you mean 'learning_rate'" in said and "line" in said


def test_debug_shows_the_traceback(tmp_path: Path):
    config = write(tmp_path, model="nowhere")
    done = subprocess.run(
        [AGENTJET, "--debug", "up", "--config", str(config)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_an_unknown_option_is_wrong_usage():
    done = subprocess.run([AGENTJET, "up", "--confg", "x"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_what_was_collected_stays_when_the_agent_breaks(tmp_path: Path):
    config = write(tmp_path)
    done = subprocess.run([AGENTJET, "up", "--config", str(config)], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0
    (tmp_path / "agent.py").write_text("raise RuntimeError('gone')")
    config.write_text(config.read_text().replace("num_steps = 1", "num_steps = 2"))
    complaint(config)
    (tmp_path / "agent.py").write_text(AGENT)
    done = subprocess.run([AGENTJET, "up", "--config", str(config)], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0
    assert (tmp_path / "run" / "checkpoints" / "small").is_dir()
    versions = sorted(path.name for path in (tmp_path / "run" / "checkpoints" / "small").iterdir())
    assert versions[-1].endswith("-2")

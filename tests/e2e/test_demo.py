"""Whole runs by the command that a newcomer types: real server, real processes, real (tiny) models."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served_engine import build_small, needs_vllm

AGENTJET = [str(Path(sys.executable).with_name("agentjet"))]


def agentjet(*words: str, timeout_seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*AGENTJET, *words], capture_output=True, text=True, timeout=timeout_seconds, check=False)


def json_of(*words: str) -> Any:
    done = agentjet(*words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def running_demo(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A demo under way that would take minutes; interrupted at the end if the test has not."""
    words = ("demo", "--model", "tiny", "--steps", "500", "--seed", "3", "--dir", str(tmp_path / "run"))
    process = subprocess.Popen([*AGENTJET, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process, tmp_path / "run"
    finally:
        process.terminate()
        process.wait(30)
        if process.stdout:
            process.stdout.close()


def wait_for_step(folder: Path, step: int, seconds: float = 90.0) -> dict[str, Any]:
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        done = agentjet("status", "--json", "--config", str(folder / "swarm.toml"))
        if done.returncode == 0:
            status = json.loads(done.stdout)
            if status["models"] and min(model["step"] for model in status["models"]) >= step:
                return status
        time.sleep(0.5)
    raise AssertionError(f"step {step} was not reached: {done.stdout}{done.stderr}")


def test_the_tiny_demo_trains_and_accounts_for_every_episode(tmp_path: Path):
    words = ("demo", "--model", "tiny", "--steps", "6", "--json", "--seed", "1", "--dir", str(tmp_path / "run"))
    line = json_of(*words)
    assert line["steps"] == 6
    assert line["lost"] == line["duplicated"] == 0
    assert line["settled"] == line["episodes"] >= 6 * 32
    assert line["merge_token_ratio"] > 2
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "run" / "checkpoints" / "policy" / "1-6" / "manifest.json").is_file()
    audit = json_of("audit", "--json", "--config", str(tmp_path / "run" / "swarm.toml"))
    assert audit["settled"] == line["settled"]
    assert left_over(tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_checkpoint_is_evaluated_and_looked_at_as_the_run_did_it(tmp_path: Path):
    run, steps = tmp_path / "run", 10
    shown = agentjet("demo", "--model", "tiny", "--steps", str(steps), "--json", "--dir", str(run)).stderr
    of_run = re.search(rf"evaluation at step {steps}: +reward ([\d.]+)", shown)
    assert of_run, shown
    config = str(run / "swarm.toml")
    found = json_of("eval", "policy", "--json", "--config", config)
    assert (found["num_scored"], found["num_episodes"], found["faults"]) == (7, 7, [])
    assert found["reward_mean"] == pytest.approx(float(of_run[1]), abs=1e-3)
    folder = run / "checkpoints" / "policy" / f"1-{steps}"
    fewer = json_of("eval", str(folder), "--tasks", "2", "--repeats", "2", "--json", "--config", config)
    assert (fewer["num_scored"], fewer["num_episodes"]) == (4, 4)
    agent = tomllib.loads((run / "swarm.toml").read_text("utf-8"))["pools"]["guess"]["workflow"]
    words = ("rollout", "--once", "--dry-run", agent, "--model", str(folder), "--max-tokens", "1", "--json")
    assert json_of(*words)["reward"] is not None


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=needs_vllm)])
def test_an_adapter_is_trained_exported_and_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str):
    monkeypatch.setenv("AGENTJET_MODELS__POLICY__LORA__RANK", "4")
    monkeypatch.setenv("AGENTJET_MODELS__POLICY__PATH", str(build_small(tmp_path / "small")))
    run = tmp_path / "run"
    line = json_of("demo", "--model", "tiny", "--engine", engine, "--steps", "2", "--json", "--dir", str(run))
    assert (line["steps"], line["lost"], line["duplicated"]) == (2, 0, 0)
    checkpoint = run / "checkpoints" / "policy" / "1-2"
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert not (checkpoint / "model.safetensors").exists()
    config = str(run / "swarm.toml")
    merged = json_of("checkpoint", "export", "policy", str(tmp_path / "merged"), "--json", "--config", config)
    assert merged["merging_error"]["float32"]["max"] < 1e-4
    assert json_of("eval", "policy", "--tasks", "2", "--json", "--config", config)["num_scored"] == 2


def test_a_run_survives_the_death_of_its_server(tmp_path: Path):
    folder = tmp_path / "run"
    words = ("demo", "--model", "tiny", "--steps", "8", "--json", "--dir", str(folder))
    process = subprocess.Popen([*AGENTJET, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        wait_for_step(folder, 2)
        server = json.loads((folder / "server.json").read_text())
        os.kill(server["pid"], signal.SIGKILL)
        output, _ = process.communicate(timeout=120)
    finally:
        process.terminate()
        process.wait(60)
    assert process.returncode == 0
    line = json.loads(output)
    assert (line["steps"], line["lost"], line["duplicated"]) == (8, 0, 0)
    assert "the NATS server died and is started again" in (folder / "logs" / "swarm.log").read_text()


def left_over(folder: Path) -> list[str]:
    """Processes that still name the folder in their arguments or environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if str(folder / "run").encode() in text and int(process.name) != os.getpid():
            found.append(process.name)
    return found


def test_a_finished_demo_is_gone_on_with(tmp_path: Path):
    words = ("demo", "--model", "tiny", "--json", "--dir", str(tmp_path / "run"))
    first = json_of(*words, "--steps", "2")
    second = json_of(*words, "--steps", "4")
    assert second["run"] == first["run"]
    assert (first["steps"], second["steps"]) == (2, 4)
    assert second["lost"] == second["duplicated"] == 0


@pytest.mark.slow
def test_two_models_learn_in_one_episode(tmp_path: Path):
    words = ("demo", "--model", "tiny", "--models", "2", "--steps", "20", "--json", "--dir", str(tmp_path / "run"))
    line = json_of(*words)
    assert line["steps"] == 20
    assert line["lost"] == line["duplicated"] == 0
    assert line["reward_last"] > line["reward_first"] + 0.1
    for model in ("sender", "receiver"):
        assert (tmp_path / "run" / "checkpoints" / model / "1-20").is_dir()


def test_a_running_demo_can_be_looked_into_and_interrupted(running_demo: tuple[subprocess.Popen[str], Path]):
    process, folder = running_demo
    status = wait_for_step(folder, 2)
    kinds = {actor["actor"] for actor in status["actors"]}
    assert kinds == {"checkpoint", "curriculum", "inference", "learner", "merger", "reward", "rollout"}
    names = {stream["name"].rpartition("_")[2] for stream in status["streams"]}
    assert names >= {"TASKS", "CALLS", "SAMPLES", "LEDGER"}
    audit = json_of("audit", "--json", "--config", str(folder / "swarm.toml"))
    assert audit["lost"] == audit["duplicated"] == 0
    process.send_signal(2)
    assert process.wait(30) == 130
    # What was collected stays, and the run goes on from it.
    again = json_of("demo", "--model", "tiny", "--steps", "3", "--json", "--dir", str(folder))
    assert again["lost"] == again["duplicated"] == 0
    assert again["steps"] >= 3


def test_an_evaluation_that_was_interrupted_is_gone_on_with(running_demo: tuple[subprocess.Popen[str], Path]):
    process, folder = running_demo
    log, give_up = folder / "logs" / "inference-policy.log", time.monotonic() + 60
    while not (log.is_file() and '"new weights"' in log.read_text()):
        assert time.monotonic() < give_up, "the engine got no weights"
        time.sleep(0.02)
    time.sleep(0.6)  # the evaluation of step 0 is out, most of it is not played
    process.send_signal(2)
    assert process.wait(30) == 130
    # The learner that starts again calls the same weights 2-0.
    again = json_of("demo", "--model", "tiny", "--steps", "1", "--json", "--dir", str(folder))
    assert again["lost"] == again["duplicated"] == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
@needs_vllm
def test_a_demo_trains_with_vllm_and_leaves_nothing_behind(tmp_path: Path):
    words = ("demo", "--engine", "vllm", "--steps", "1", "--json", "--dir", str(tmp_path / "run"))
    done = agentjet(*words, timeout_seconds=380)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert (line["steps"], line["lost"], line["duplicated"]) == (1, 0, 0)
    log = (tmp_path / "run" / "logs" / "inference-policy.log").read_text()
    assert "weights_in_place" in log
    assert "Exception ignored" not in log
    assert left_over(tmp_path) == []

"""Actor processes: restart, giving up, stopping. The actors here are small modules of the test's own."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from agentjet.actors.supervisor import MAX_YOUNG_DEATHS, ActorProcess, ActorSpec, actor_specs
from agentjet.config import ModelSettings, PoolSettings, SwarmSettings
from agentjet.errors import FINAL_EXIT_CODE, UserError


def actor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, model: str = "", kind: str = "learner"
) -> ActorProcess:
    """An actor process whose module is `body`: a stand-in `python` drops `-m agentjet.actors.KIND`."""
    script = tmp_path / "actor.py"
    script.write_text(body)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" "{script}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return ActorProcess(ActorSpec(kind, model), ["--config", "x"], {"COLOUR": "blue"}, tmp_path / "logs" / "a.log")


async def test_an_actor_that_ends_with_zero_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    process = actor(tmp_path, monkeypatch, "import os, sys; print(sys.argv[1:], os.environ['COLOUR'])", model="small")
    await process.live()
    assert process.num_starts == 1
    assert process.last_line() == "['--config', 'x', '--model', 'small'] blue"


async def test_an_actor_without_an_end_is_started_again_when_somebody_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    body = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nprint('up', flush=True)"
    process = actor(tmp_path, monkeypatch, body + "\ntime.sleep(60)", kind="merger")
    life = asyncio.ensure_future(process.live())
    await until(lambda: process.log_path.exists() and "up" in process.log_path.read_text())
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    await until(lambda: process.num_starts == 2)
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)


async def test_an_actor_that_crashes_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mark = tmp_path / "mark"
    body = f"import pathlib, sys\nmark = pathlib.Path({str(mark)!r})\nif not mark.exists(): mark.touch(); sys.exit(3)"
    process = actor(tmp_path, monkeypatch, body)
    await process.live()
    assert process.num_starts == 2


async def test_a6_an_actor_that_can_not_start_is_a_named_error_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    process = actor(tmp_path, monkeypatch, "import sys; sys.exit('agentjet test: no such model')")
    started = time.monotonic()
    with pytest.raises(UserError, match=r"learner does not start \(agentjet test: no such model\)"):
        await process.live()
    assert time.monotonic() - started < 15
    assert process.num_starts == 3


async def test_cancelling_ends_the_process_by_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    body = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(0)))"
    process = actor(tmp_path, monkeypatch, body + "\nprint('up', flush=True)\ntime.sleep(60)")
    life = asyncio.ensure_future(process.live())
    await until(lambda: process.log_path.exists() and "up" in process.log_path.read_text())
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)
    assert process.last_line() == "bye"
    assert process.pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


async def test_a_killed_actor_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    process = actor(tmp_path, monkeypatch, "import time\nprint('up', flush=True)\ntime.sleep(60)")
    life = asyncio.ensure_future(process.live())
    await until(lambda: process.log_path.exists() and process.log_path.read_text().count("up") == 1)
    process.kill()
    await until(lambda: process.log_path.read_text().count("up") == 2)
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)
    assert process.num_starts == 2


async def test_kills_are_not_counted_as_deaths_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    process = actor(tmp_path, monkeypatch, "import time; time.sleep(60)")
    life = asyncio.create_task(process.live())
    for number in range(1, MAX_YOUNG_DEATHS + 2):
        while process.num_starts < number:
            await asyncio.sleep(0.01)
        process.kill()
    while process.num_starts < MAX_YOUNG_DEATHS + 2:
        await asyncio.sleep(0.01)
    assert not life.done()
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)


def test_every_model_has_an_engine_and_every_trained_one_a_learner():
    settings = SwarmSettings(
        models={"small": ModelSettings(path="a"), "judge": ModelSettings(path="b", is_trained=False)},
        pools={"guess": PoolSettings(workflow="agent.py:run")},
    )
    names = [spec.name for spec in actor_specs(settings)]
    assert {"inference-small", "inference-judge", "learner-small", "rollout", "curriculum"} <= set(names)
    assert "learner-judge" not in names


def test_a_model_gets_as_many_engines_as_are_asked_for_each_with_a_log_of_its_own():
    settings = SwarmSettings(models={"small": ModelSettings(path="a", num_engines=3)})
    specs = [spec for spec in actor_specs(settings) if spec.kind == "inference"]
    assert [spec.name for spec in specs] == ["inference-small", "inference-small.2", "inference-small.3"]
    assert {spec.model for spec in specs} == {"small"}


def test_without_a_workflow_no_rollout_is_started():
    settings = SwarmSettings(models={"small": ModelSettings(path="a")}, pools={"guess": PoolSettings()})
    assert "rollout" not in [spec.kind for spec in actor_specs(settings)]


async def until(condition, seconds: float = 10.0) -> None:
    """Poll for what another process does."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def test_an_actor_that_has_stopped_for_good_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    body = f"import sys; print('another learner has taken over'); sys.exit({FINAL_EXIT_CODE})"
    process = actor(tmp_path, monkeypatch, body)
    with pytest.raises(UserError, match=r"has stopped for good \(another learner has taken over\)"):
        await process.live()
    assert process.num_starts == 1

"""The rollout actor, as far as it is wiring."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agentjet.actors import rollout as actor_module
from agentjet.config.settings import SwarmSettings
from agentjet.errors import WorkflowError


class FakeRollout:
    """Plays until it is cancelled, and writes down what happens."""

    error: Exception | None = None

    def __init__(self, *_: object) -> None:
        self.waiting, self.metrics = tuple, dict

    async def run(self) -> None:
        if self.error is not None:
            raise self.error
        try:
            await asyncio.Event().wait()
        finally:
            events.append("ended")

    async def drain(self, timeout_seconds: float) -> None:
        events.append("draining")
        await asyncio.sleep(0.05)
        events.append("drained")


class FakeGateway:
    """Writes down that it is closed."""

    def __init__(self, *_: object) -> None: ...

    async def start(self) -> str:
        return "http://127.0.0.1:9/v1"

    async def close(self) -> None:
        events.append("closed")


events: list[str] = []


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Any:
    events.clear()
    monkeypatch.setattr(actor_module, "Rollout", FakeRollout)
    monkeypatch.setattr(actor_module, "Gateway", FakeGateway)
    return SimpleNamespace(bus=None, run="r", settings=SwarmSettings(), info={})


async def test_a_stop_lets_episodes_end_before_anything_is_closed(actor: Any):
    task = asyncio.create_task(actor_module.run(actor))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert events == ["draining", "drained", "ended", "closed"]


async def test_a_rollout_that_fails_is_not_drained(actor: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeRollout, "error", WorkflowError("no licence"))
    with pytest.raises(WorkflowError, match="no licence"):
        await asyncio.wait_for(actor_module.run(actor), 5)
    assert events == ["closed"]

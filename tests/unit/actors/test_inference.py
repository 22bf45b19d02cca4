"""The inference actor, as far as it is wiring."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agentjet.actors import inference
from agentjet.config.settings import ModelSettings, SwarmSettings
from agentjet.errors import EngineError


class DyingEngine:
    """Ends by itself a moment after its start."""

    is_closed = False

    async def start(self) -> None: ...

    async def ended(self) -> None:
        await asyncio.sleep(0.01)
        raise EngineError("the engine has ended")

    async def close(self) -> None:
        DyingEngine.is_closed = True


async def test_an_engine_that_is_gone_ends_the_actor(monkeypatch: pytest.MonkeyPatch):
    async def serve(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(inference, "engine_of", lambda of: DyingEngine())
    monkeypatch.setattr(inference, "load_tokenizer", lambda path: SimpleNamespace(chat_template=""))
    monkeypatch.setattr(inference, "stop_ids", lambda path: frozenset())
    monkeypatch.setattr(inference, "_serve", serve)
    actor: Any = SimpleNamespace(settings=SwarmSettings(models={"m": ModelSettings(path="tiny")}), model="m")
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(5):
            await inference.run(actor)
    assert caught.group_contains(EngineError, match="has ended")
    assert DyingEngine.is_closed

"""The inference actor: one engine of one model; owns tokens, records every call, loads weights in flight."""

import asyncio
import os
from pathlib import Path

from agentjet.actors.process import Actor, host_token, main
from agentjet.chat.tokenizer import Tokenizer
from agentjet.inference.engine import Engine
from agentjet.inference.service import InferenceService
from agentjet.inference.transformers_engine import TransformersEngine
from agentjet.inference.weights import WeightsFollower
from agentjet.pretrained.tokenizer import load_tokenizer, stop_ids
from agentjet.schemas.ids import Version
from agentjet.schemas.presence import Waiting


async def run(actor: Actor) -> None:
    """Until stopped."""
    of = actor.settings.models[actor.model]
    engine = TransformersEngine.from_settings(of.path, of.engine)
    await engine.start()
    try:
        async with asyncio.TaskGroup() as group:
            # An engine that is gone would answer every question of the shared queue with an error.
            group.create_task(engine.ended())
            await _serve(actor, engine, load_tokenizer(of.path), stop_ids(of.path))
    finally:
        await engine.close()


async def _serve(actor: Actor, engine: Engine, tokenizer: Tokenizer, end_ids: frozenset[int]) -> None:
    name = host_token()
    folder: Path = actor.place.weights(actor.model) / f"arriving-{os.getpid()}"
    follower = WeightsFollower(
        actor.bus,
        actor.run,
        actor.model,
        engine,
        folder,
        hold_seconds=actor.settings.models[actor.model].engine.hold_seconds,
        on_loaded=lambda version, seconds: loaded(version),
    )
    service = InferenceService(
        actor.bus,
        actor.run,
        actor.model,
        engine,
        tokenizer,
        secret=actor.place.secret(),
        served_models=tuple(actor.settings.models),
        stop_ids=end_ids,
        engine_name=name,
        admit=follower.ready,
    )

    def loaded(version: Version) -> None:
        actor.info["version"] = str(version)
        service.weights_changed()

    def waiting() -> list[Waiting]:
        if follower.expected is None:
            return []
        return [Waiting(what=f"weights {follower.expected}", since=follower.expected_since, unblocked_by="learner")]

    actor.metrics, actor.waiting = service.metrics, waiting
    actor.info["version"] = str(engine.version)
    await follower.catch_up()
    actor.state = "busy"
    async with asyncio.TaskGroup() as group:
        group.create_task(follower.run())
        group.create_task(service.run())


if __name__ == "__main__":
    main("inference", run, needs_model=True)

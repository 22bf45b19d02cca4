"""The inference actor: one engine of one model; owns tokens, records every call, loads weights in flight."""

import gc

if __name__ == "__main__":
    # What is imported stays: to look for garbage in it takes a sixth of the start. `main` turns it on again.
    gc.disable()

import asyncio
import time

from agentjet.actors.actor import Actor
from agentjet.actors.process import main
from agentjet.chat.reply_format import ReplyFormat
from agentjet.chat.tokenizer import Tokenizer
from agentjet.inference.engine import Engine
from agentjet.inference.engine_choice import engine_of
from agentjet.inference.room import num_places
from agentjet.inference.service import InferenceService
from agentjet.inference.vllm_format import reply_format
from agentjet.inference.weights import WeightsFollower
from agentjet.pretrained.tokenizer import load_tokenizer, stop_ids
from agentjet.schemas.ids import Version
from agentjet.schemas.presence import Waiting


async def run(actor: Actor) -> None:
    """Until stopped."""
    of = actor.settings.models[actor.model]
    tokenizer = load_tokenizer(of.path)
    # In a thread: to import vLLM takes seconds, and presence has to be told meanwhile.
    form = await asyncio.to_thread(
        reply_format, tokenizer, tool_parser=of.tool_parser, reasoning_parser=of.reasoning_parser
    )
    engine = engine_of(of)
    await engine.start()
    try:
        async with asyncio.TaskGroup() as group:
            # An engine that is gone would answer every question of the shared queue with an error.
            group.create_task(engine.ended())
            await _serve(actor, engine, tokenizer, stop_ids(of.path), form)
    finally:
        await engine.close()


async def _serve(
    actor: Actor, engine: Engine, tokenizer: Tokenizer, end_ids: frozenset[int], form: ReplyFormat
) -> None:
    of = actor.settings.models[actor.model]
    started = time.time()
    follower = WeightsFollower(
        actor.bus,
        actor.run,
        actor.model,
        engine,
        actor.place.weights(actor.model),
        hold_seconds=of.engine.hold_seconds,
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
        engine_name=actor.name,
        num_places=num_places(of.engine.max_running),
        admit=follower.ready,
        is_same=follower.is_same,
        reply_format=form,
    )

    def loaded(version: Version) -> None:
        actor.info["version"] = str(version)
        service.weights_changed()

    def waiting() -> list[Waiting]:
        if actor.state != "busy":
            return [Waiting(what="the newest weights to be loaded", since=started, unblocked_by="learner")]
        if follower.expected is None:
            return []
        return [Waiting(what=f"weights {follower.expected}", since=follower.expected_since, unblocked_by="learner")]

    actor.metrics, actor.waiting = service.metrics, waiting
    actor.info["version"] = str(engine.version)
    await follower.catch_up()
    async with asyncio.TaskGroup() as group:
        group.create_task(follower.run())
        await follower.caught_up()
        actor.state = "busy"
        group.create_task(service.run())


if __name__ == "__main__":
    main("inference", run, needs_model=True)

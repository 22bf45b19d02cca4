"""Learner and embedded engine in a circle: what is drawn is trained, and the adapter that comes of it draws again."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from engine_use import ask, collect, ids_of, logprobs_of, prompt
from learner_run import MODEL, after_step, living, put_slot, sample, settings, steps, until

from agentjet.inference.engine_choice import engine_of
from agentjet.inference.weights import WeightsFollower
from agentjet.schemas.ids import Version
from agentjet.schemas.sample import SampledCall, Segment


@pytest.mark.parametrize("route", ["path", "bus"])
async def test_engines_draw_with_the_adapter_that_the_learner_has(memory_bus, run, tmp_path, model_folder: Path, route):
    of = settings(tmp_path, model_folder, lora_rank=4, learning_rate=1e-2, weights_route=route, snapshot_every=2)
    model = of.models[MODEL]
    model = model.model_copy(update={"agreement": model.agreement.model_copy(update={"every_steps": 1})})
    of = of.model_copy(update={"models": {MODEL: model}})
    engine = engine_of(model)
    await engine.start()
    follower = asyncio.create_task(
        WeightsFollower(memory_bus, run, MODEL, engine, tmp_path / "engine", hold_seconds=1.0).run()
    )

    async def draw(group: int, member: int) -> None:
        start = prompt(10 * group + member, 9)
        draws = await collect(engine, ask(f"{group}.{member}", start, max_tokens=6, seed=group + 7 * member))
        ids = ids_of(draws)
        record = sample(run, group, member, float(member)).model_copy(
            update={
                "segments": (Segment(parent=-1, ids=(*start, *ids)),),
                "calls": (
                    SampledCall(call="c", num_terms=len(ids), versions=tuple(str(one.version) for one in draws[:1])),
                ),
                "term_segment": (0,) * len(ids),
                "term_offset": tuple(range(9, 9 + len(ids))),
                "term_logprob": tuple(logprobs_of(draws).tolist()),
            }
        )
        await put_slot(memory_bus, run, record)

    try:
        async with living(memory_bus, run, of):
            for step in range(3):
                await until(lambda step=step: serves(engine, Version(1, step)))
                await asyncio.gather(*(draw(2 * step + group, member) for group in (0, 1) for member in (0, 1)))
                await until(after_step(memory_bus, run, step + 1))
    finally:
        follower.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await follower
        await engine.close()
    taken = await steps(memory_bus, run)
    assert len({step.digest for step in taken}) == 3
    for step in taken:
        assert step.metrics["agreement_num_tokens"] > 12
        assert step.metrics["agreement_max_nats"] < 1e-4, step.step


async def serves(engine, version: Version) -> bool:
    return engine.version == version

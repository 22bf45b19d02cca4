"""A judge or a frozen opponent behind the gateway: called like any model, trained by nobody."""

import asyncio
from contextlib import asynccontextmanager

import openai
import pytest
from chat_models import RUN, user
from gateway_site import Site
from small_swarm import SmallSwarm

from agentjet.config.settings import GatewaySettings
from agentjet.gateway import Gateway


@asynccontextmanager
async def judged(bus, settings=None, **options):
    """A site whose episodes play `m` and may call `judge`."""
    async with SmallSwarm(bus, untrained=("judge",), **options).running() as swarm:
        judge = asyncio.create_task(swarm.new_service("judge", engine_name="other").run())
        gateway = Gateway(bus, RUN, settings or GatewaySettings())
        try:
            yield Site(swarm, gateway, await gateway.start())
        finally:
            await gateway.close()
            judge.cancel()
            await asyncio.gather(judge, return_exceptions=True)


async def test_an_untrained_model_draws_as_asked_and_stands_apart_in_the_session(memory_bus):
    async with judged(memory_bus, GatewaySettings(is_strict=True)) as here:
        key = await here.swarm.claim()
        await here.say(key)
        async with here.client(key) as client:
            greedy = {"messages": [user("good?")], "temperature": 0.0, "top_p": 0.5}
            verdict = await client.chat.completions.create(model="judge", **greedy)
            assert verdict.choices[0].message.content == "hi"
            with pytest.raises(openai.BadRequestError, match="ratio"):
                await client.chat.completions.create(model="m", **greedy)
            assert [model.id async for model in client.models.list()] == ["m", "judge"]
        sampling = here.swarm.engine.generations[-1].sampling
        assert (sampling.temperature, sampling.top_p) == (0.0, 0.5)
        session = here.gateway.session(key)
        assert {model: len(calls) for model, calls in session.calls.items()} == {"m": 1, "judge": 1}
        assert [call.model for call in await here.swarm.calls()] == ["m", "judge"]


async def test_a_judges_full_context_is_not_the_episodes_stop_reason(memory_bus):
    async with judged(memory_bus, context_length=30) as here:
        key = await here.swarm.claim()
        async with here.client(key) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="judge", messages=[user("long " * 40)])
        assert caught.value.code == "context_length_exceeded"
        assert here.gateway.session(key).stop_reason == ""

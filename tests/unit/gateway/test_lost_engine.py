"""An engine that dies under a call: replaced unseen while nothing was said, an error once something was."""

import asyncio
from contextlib import asynccontextmanager

import openai
import pytest
from chat_models import RUN, user
from gateway_site import Site
from small_swarm import SmallSwarm

from agentjet.bus.memory import MemoryBus
from agentjet.config.settings import GatewaySettings
from agentjet.gateway import Gateway
from agentjet.schemas import subject

BODY = {"model": "m", "messages": [user("q")]}


class Pair(Site):
    """A site whose service may be killed, and followed by another."""

    async def kill(self) -> None:
        """As SIGKILL would: nothing is handed back, no caller is told."""
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)

    def replace(self) -> None:
        service = self.swarm.new_service(engine_name="other")
        self.serving = asyncio.create_task(service.run())


@asynccontextmanager
async def pair(bus: MemoryBus, monkeypatch):
    swarm = SmallSwarm(bus, "low low low")
    await swarm.prepare()
    # A question that nobody acknowledges comes again soon.
    consumer = bus.consumer

    def impatient(*args, **options):
        return consumer(*args, **options | {"ack_wait_seconds": 0.2})

    monkeypatch.setattr(bus, "consumer", impatient)
    async with bus.serve(subject.authorize_service(RUN), swarm.authorize, queue="curriculum"):
        gateway = Gateway(bus, RUN, GatewaySettings())
        here = Pair(swarm, gateway, await gateway.start())
        here.replace()
        try:
            yield here
        finally:
            await gateway.close()
            await here.kill()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_engine_that_dies_before_any_text_is_replaced_and_the_agent_sees_only_latency(
    memory_bus, monkeypatch, is_streamed
):
    async with pair(memory_bus, monkeypatch) as here:
        here.swarm.engine.go.clear()
        silent = asyncio.Event()
        generate = here.swarm.engine.generate

        async def stuck(generation):
            silent.set()
            await asyncio.Event().wait()
            yield

        monkeypatch.setattr(here.swarm.engine, "generate", stuck)
        key = await here.swarm.claim()
        async with here.client(key) as client:
            asked = asyncio.create_task(client.chat.completions.create(**BODY, stream=is_streamed))
            await silent.wait()
            await here.kill()
            monkeypatch.setattr(here.swarm.engine, "generate", generate)
            here.swarm.engine.go.set()
            here.replace()
            answer = await asyncio.wait_for(asked, 20)
            if is_streamed:
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
            else:
                text = answer.choices[0].message.content
        (call,) = await here.swarm.calls()
        assert (text, call.engine) == ("low low low", "other")
        assert here.gateway.session(key).calls["m"] == [call.call]


async def test_an_engine_that_dies_in_the_middle_of_a_stream_ends_it_in_an_error_and_no_call_is_answered(
    memory_bus, monkeypatch
):
    async with pair(memory_bus, monkeypatch) as here:
        here.swarm.engine.go.clear()
        key = await here.swarm.claim()
        async with here.client(key) as client:
            stream = aiter(await client.chat.completions.create(**BODY, stream=True))
            first = await anext(stream)
            assert first.choices[0].delta.content
            await here.kill()
            here.swarm.engine.go.set()
            here.replace()
            with pytest.raises(openai.APIError, match="engine was lost"):
                async for _ in stream:
                    pass
            assert here.gateway.session(key).calls["m"] == []
            # The agent asks again, as its client's marked retry does: another sample, whole.
            again = await client.chat.completions.create(**BODY, extra_headers={"x-stainless-retry-count": "1"})
        assert again.choices[0].message.content == "low low low"
        assert len(here.gateway.session(key).calls["m"]) == 1

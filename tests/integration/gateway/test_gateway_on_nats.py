"""Gateway and inference over a real NATS server."""

import asyncio

import pytest
from chat_models import RUN, user
from openai import AsyncOpenAI
from small_swarm import SmallSwarm

from agentjet.bus.nats import NatsBus
from agentjet.bus.server import EmbeddedServer
from agentjet.config.settings import GatewaySettings
from agentjet.gateway import Gateway
from agentjet.schemas.call import ForkCause
from agentjet.schemas.subject import stream_prefix


@pytest.fixture
async def swarm(nats_bus: NatsBus):
    async with SmallSwarm(nats_bus).running() as swarm:
        yield swarm
    for name in await nats_bus.stream_names(stream_prefix(RUN)):
        await nats_bus.delete_stream(name)


async def test_concurrent_episodes_get_their_own_replies(swarm, nats_server: EmbeddedServer):
    swarm.engine.reply = lambda prompt: prompt.rpartition("user\n")[2].partition("<|im_end|>")[0]
    bus = await NatsBus.connect(nats_server.url, name="gateway")
    gateway = Gateway(bus, RUN, GatewaySettings())
    url = await gateway.start()

    async def episode(index: int) -> list[str]:
        key, messages, texts = await swarm.claim(group=f"g-{index}"), [], []
        async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            for turn in range(3):
                messages.append(user(f"{index} {turn}"))
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages.append(answer.choices[0].message)
                texts.append(answer.choices[0].message.content)
        return texts

    texts = await asyncio.gather(*(episode(index) for index in range(16)))
    assert texts == [[f"{index} {turn}" for turn in range(3)] for index in range(16)]
    forks = [call.fork for call in await swarm.calls()]
    assert forks.count(ForkCause.FIRST) == 16
    assert forks.count(ForkCause.NONE) == 32
    await gateway.close()
    await bus.close()


async def test_a_closed_stream_cancels_across_the_server(swarm, nats_server: EmbeddedServer):
    swarm.engine.go.clear()
    bus = await NatsBus.connect(nats_server.url, name="gateway")
    gateway = Gateway(bus, RUN, GatewaySettings())
    url = await gateway.start()
    async with AsyncOpenAI(base_url=url, api_key=await swarm.claim(), max_retries=0) as client:
        stream = await client.chat.completions.create(model="m", messages=[user("q")], stream=True)
        await anext(aiter(stream))
        await stream.close()
    async with asyncio.timeout(20):
        while not swarm.engine.num_closed:
            await asyncio.sleep(0.01)
    await gateway.close()
    await bus.close()

"""A swarm with a scripted engine behind a real HTTP gateway, and OpenAI's own client in front of it."""

import asyncio
from contextlib import asynccontextmanager

from chat_models import RUN, user
from openai import AsyncOpenAI
from small_swarm import SmallSwarm

from agentjet.bus.memory import MemoryBus
from agentjet.config.settings import GatewaySettings
from agentjet.gateway import Gateway


class Site:
    """A swarm, a gateway, and clients."""

    def __init__(self, swarm, gateway, url):
        self.swarm, self.gateway, self.url = swarm, gateway, url

    @asynccontextmanager
    async def client(self, key, **options):
        async with AsyncOpenAI(base_url=self.url, api_key=key, max_retries=0, **options) as client:
            yield client

    async def say(self, key, text="q", **fields):
        async with self.client(key) as client:
            return await client.chat.completions.create(model="m", messages=[user(text)], **fields)


@asynccontextmanager
async def site(bus: MemoryBus, *args, settings=None, **options):
    async with SmallSwarm(bus, *args, **options).running() as swarm:
        gateway = Gateway(bus, RUN, settings or GatewaySettings())
        url = await gateway.start()
        try:
            yield Site(swarm, gateway, url)
        finally:
            await gateway.close()


async def until(is_true, seconds=15.0):
    async with asyncio.timeout(seconds):
        while not is_true():
            await asyncio.sleep(0.005)

"""What the gateway takes at once, and that whoever is slow is not waited for."""

import asyncio
import contextlib

import httpx
import openai
import pytest
from chat_models import user
from gateway_site import site, until

from agentjet.config.settings import GatewaySettings
from agentjet.gateway import limit
from agentjet.gateway.endpoint import build_app
from agentjet.gateway.limit import Limits

BODY = {"model": "m", "messages": [user("q")]}


async def test_more_requests_than_may_run_are_told_to_come_again(memory_bus):
    async with site(memory_bus, settings=GatewaySettings(max_requests=2)) as here:
        here.swarm.engine.go.clear()
        key = await here.swarm.claim()
        async with here.client(key) as client:
            stream = await client.chat.completions.create(**BODY, stream=True)
            whole = asyncio.create_task(client.chat.completions.create(**BODY))
            await until(lambda: len(here.swarm.engine.generations) == 2)
            with pytest.raises(openai.RateLimitError, match=r"gateway\.max_requests") as refused:
                await client.chat.completions.create(**BODY)
            assert refused.value.response.headers["retry-after"] == "1"
            here.swarm.engine.go.set()
            await whole
            assert [chunk async for chunk in stream]
            await client.chat.completions.create(**BODY)
        assert len(here.swarm.engine.generations) == 3


async def test_who_leaves_gives_the_seat_back(memory_bus):
    async with site(memory_bus, settings=GatewaySettings(max_requests=1)) as here:
        here.swarm.engine.go.clear()
        key = await here.swarm.claim()
        async with here.client(key) as client:
            stream = await client.chat.completions.create(**BODY, stream=True)
            await anext(aiter(stream))
            await stream.close()
            await until(lambda: here.swarm.engine.num_closed == 1)
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(**BODY, timeout=0.2)
            await until(lambda: here.swarm.engine.num_closed == 2)
            here.swarm.engine.go.set()
            await client.chat.completions.create(**BODY)


@pytest.mark.parametrize(
    ("settings", "sent", "status", "code"),
    [
        ({"max_body_bytes": 500}, {"json": BODY | {"user": "x" * 1000}}, 413, "body_too_large"),
        ({"max_header_bytes": 900}, {"json": BODY, "headers": {"x-large": "x" * 900}}, 431, "headers_too_large"),
        ({"max_messages": 3}, {"json": BODY | {"messages": [user("q")] * 4}}, 400, "too_many_messages"),
    ],
)
async def test_what_is_too_large_is_refused_by_name(memory_bus, settings, sent, status, code):
    async with site(memory_bus, settings=GatewaySettings(**settings)) as here:
        headers = {"authorization": f"Bearer {await here.swarm.claim()}"}
        async with httpx.AsyncClient(headers=headers) as client:
            refused = await client.post(f"{here.url}/chat/completions", **sent)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
        assert next(iter(settings)) in refused.json()["error"]["message"]
        assert not here.swarm.engine.generations


async def test_endless_headers_end_the_connection(memory_bus):
    async with site(memory_bus) as here:
        port = int(here.url.rpartition(":")[2].partition("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nx: " + b"x" * 200_000)
            async with asyncio.timeout(5):
                await reader.read()
        writer.close()


def scope_of(path):
    headers = [(b"content-length", b"1000")]
    return {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}


async def never(*_):
    await asyncio.Event().wait()


@pytest.fixture
def short(monkeypatch):
    """Settings of a gateway whose requests may take a moment."""
    monkeypatch.setattr(limit, "GRACE_SECONDS", 0.05)
    return GatewaySettings(request_seconds=0.05)


async def test_a_body_that_does_not_come_is_not_waited_for(memory_bus, short):
    sent = []

    async def send(message):
        sent.append(message)

    async with site(memory_bus) as here:
        await asyncio.wait_for(build_app(here.gateway, Limits(short))(scope_of("/v1/chat/completions"), never, send), 5)
    assert sent[0]["status"] == 504
    assert b"longer than" in sent[1]["body"]


async def test_a_reader_that_does_not_read_is_not_waited_for(memory_bus, short):
    async with site(memory_bus) as here:
        limits = Limits(short)
        scope = scope_of("/v1/chat/completions")
        scope["headers"] = [(b"authorization", b"Bearer " + (await here.swarm.claim()).encode())]
        body = [{"type": "http.request", "body": b'{"model": "m", "messages": [{"role": "user", "content": "q"}]}'}]

        async def receive():
            return body.pop() if body else await never()

        await asyncio.wait_for(build_app(here.gateway, limits)(scope, receive, never), 5)
        with limits.seat():
            assert limits._num_requests == 1

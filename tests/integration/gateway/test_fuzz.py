"""Thousands of strange requests to every endpoint: no crash, no hang, and the session says what CALLS holds."""

import asyncio
import json
from typing import Any

import pytest
from chat_models import QWEN, RUN
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from small_swarm import SmallSwarm
from strange_body import SCHEMAS, STRANGE, Body, with_strange_place

from agentjet.bus.memory import MemoryBus
from agentjet.config.settings import GatewaySettings
from agentjet.gateway import Gateway
from agentjet.gateway.endpoint import DIALECTS, build_app
from agentjet.gateway.limit import Limits

NUM_REQUESTS = 5_040
BATCH = 12
HANG_SECONDS = 60.0
PATHS = sorted({path for dialect in DIALECTS for path in dialect.paths})
changes = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, len(STRANGE) - 1)), min_size=BATCH - 1, max_size=BATCH - 1
)


class Target:
    """A gateway and an engine in this process, asked without a connection."""

    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.swarm = SmallSwarm(self.bus, "low <tool_call>{", template=QWEN, context_length=16_000)
        self.gateway = Gateway(self.bus, RUN, GatewaySettings())
        self.app = build_app(self.gateway, Limits(GatewaySettings()))
        self.num_keys = 0

    async def ask(self, path: str, key: str, body: Body) -> tuple[int, bytes]:
        """Status and body of the response."""
        sent: list[Any] = []
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"authorization", f"Bearer {key}".encode())],
        }
        coming = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            return coming.pop() if coming else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        async with asyncio.timeout(HANG_SECONDS):
            await self.app(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)

    async def check(self, path: str, bodies: list[Body]) -> None:
        """All of them at once, with a key of their own."""
        self.num_keys += 1
        key = await self.swarm.claim(group=f"g-{self.num_keys}")
        answers = await asyncio.gather(*(self.ask(path, key, body) for body in bodies))
        for body, (status, answer) in zip(bodies, answers, strict=True):
            shown = json.dumps(body)[:2000]
            assert status < 500, f"{status} {answer[:500]!r} for {shown}"
            if status != 200:
                assert _says_why(json.loads(answer)), f"{answer!r} for {shown}"
        told = set(self.gateway.session(key).calls["m"])
        stored = {call.call for call in await self.swarm.calls() if call.ticket == f"g-{self.num_keys}.0.0"}
        assert told == stored
        named = b"".join(answer for status, answer in answers if status == 200)
        assert all(call.encode() in named for call in told if "/completions" not in path or _is_single(bodies))
        makes_calls = not path.endswith("/count_tokens")
        assert bool(told) == (makes_calls and any(status == 200 for status, _ in answers))
        self.gateway.forget(key)
        await self.bus.purge(f"AJ_{RUN}_CALLS", below_sequence=2**62)


def _is_single(bodies: list[Body]) -> bool:
    return all(body.get("n", 1) == 1 for body in bodies)


def _says_why(answer: Any) -> bool:
    error = answer["error"]
    return bool(error["message"]) and bool(error.get("type"))


def test_every_path_has_a_schema() -> None:
    assert set(PATHS) <= set(SCHEMAS)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_strange_requests_neither_crash_nor_hang_and_every_call_is_accounted_for(path: str) -> None:
    with asyncio.Runner() as runner:
        target = Target()
        serving = target.swarm.running()
        runner.run(serving.__aenter__())

        @settings(
            max_examples=-(-NUM_REQUESTS // (BATCH * len(PATHS))),
            database=None,
            phases=[Phase.explicit, Phase.generate],  # a body that fails is short enough as it is
            suppress_health_check=list(HealthCheck),
        )
        @given(SCHEMAS[path], changes)
        def check(body: Body, strange: list[tuple[int, int]]) -> None:
            changed = [with_strange_place(body, number, STRANGE[index]) for number, index in strange]
            runner.run(target.check(path, [body, *changed]))

        try:
            check()
        finally:
            runner.run(serving.__aexit__(None, None, None))
            runner.run(target.gateway.close())

"""What the gateway costs: latency and throughput of 64 agents, and its own time as conversations grow.

A real nats-server, an inference service in a process of its own, and a gateway whose agents (raw HTTP clients) share
its process, so their time counts as the gateway's. The engine is scripted and paced like a real one (`PACE`): some time
until a request's first token, then one token after the other, whatever the number of requests. The same agents then
call an engine of that kind in their own process. Added latency is the difference of the turns' quantiles; throughput
is tokens per second.

The time per turn is the processor time of a process that holds the gateway and nothing else of weight: it reads, checks
and normalises the body, takes its digest, publishes the question and writes the reply; a client hands bytes to the
application. It is given for turns 8, 32 and 128 of growing conversations, as medians of the turns around them, and with
it the whole turn's seconds by the clock.

    python benchmarks/gateway.py --json [--agents 64] [--turns 6] [--tokens 64]
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from command import arguments, machine, show

from agentjet.accounting.key import Key, sign
from agentjet.bus.clock import BusClock
from agentjet.bus.nats import NatsBus
from agentjet.bus.record import answering, put, stream_specs
from agentjet.bus.server import EmbeddedServer
from agentjet.config.settings import GatewaySettings
from agentjet.curriculum.board import Board
from agentjet.curriculum.service import ClaimDesk
from agentjet.gateway import Gateway
from agentjet.gateway.endpoint import build_app
from agentjet.gateway.limit import Limits
from agentjet.inference.engine import Draw, EngineLoad, Generation
from agentjet.inference.service import InferenceService
from agentjet.pretrained.tokenizer import load_tokenizer, stop_ids
from agentjet.schemas import subject
from agentjet.schemas.call import FinishReason
from agentjet.schemas.claim import AuthorizeRequest, Claim
from agentjet.schemas.ids import GroupId, RunId, Version
from agentjet.schemas.sampling import Sampling
from agentjet.schemas.subject import Stream
from agentjet.schemas.task import Ticket

RUN = RunId("bench-aaaaaa")
SECRET = bytes(range(32))
PACE = {"paced": (0.05, 0.025), "fast": (0.0, 0.0)}
"""Model: seconds until the first token, and between two."""
PLACES = (8, 32, 128)
AROUND = 4
QUESTION = "The tool says: " + "the quick brown fox jumps over the lazy dog; " * 8
WORDS = "so I look at the next one and go on with it as before, "
REPLY_TOKENS = 24
"""Of a turn of a growing conversation."""


class PacedEngine:
    """Says the same words again and again, `max_tokens` of them, at a pace."""

    context_length = 1 << 20
    version = Version(0, 0)
    load = EngineLoad(0, 0, 0, 0.0)

    def __init__(self, model: str, words: list[int]) -> None:
        self._first, self._step = PACE[model]
        self._words = words

    async def generate(self, generation: Generation) -> AsyncIterator[Draw]:
        due = time.monotonic() + self._first
        for index in range(generation.sampling.max_tokens):
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            is_last = index + 1 == generation.sampling.max_tokens
            token = self._words[index % len(self._words)]
            yield Draw((token,), (-0.5,), self.version, FinishReason.LENGTH if is_last else None)
            due += self._step


async def serve_inference(url: str) -> None:
    """The inference process: both models, until killed."""
    bus = await NatsBus.connect(url, name="inference")
    tokenizer = load_tokenizer("tiny")
    words = tokenizer.encode(WORDS, add_special_tokens=False)
    services = [
        InferenceService(
            bus,
            RUN,
            model,
            PacedEngine(model, words),  # type: ignore[arg-type]
            tokenizer,
            secret=SECRET,
            served_models=tuple(PACE),
            stop_ids=stop_ids("tiny"),
        )
        for model in PACE
    ]
    await asyncio.gather(*(service.run() for service in services))


async def claim(bus: NatsBus, name: str) -> str:
    """A key."""
    ticket = Ticket(
        run=RUN,
        pool="p",
        group=GroupId(f"p-{name}"),
        member=0,
        group_size=1,
        models=tuple(PACE),
        seed=1,
        deadline_seconds=3600.0,
    )
    attempt = await put(bus, RUN, Stream.CLAIMS, subject.claim(RUN, ticket.id), Claim(ticket=ticket, worker="w"))
    return sign(SECRET, Key(RUN, ticket.id, attempt, time.time() + 3600.0))


def quantiles(seconds: list[float]) -> tuple[float, float]:
    """p50 and p99, milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return 1000 * cuts[49], 1000 * cuts[98]


async def play(turn: Callable[[int, list[Any]], Awaitable[str]], args: argparse.Namespace) -> tuple[list[float], float]:
    """All agents at once; the seconds of each turn, and tokens per second of all."""
    seconds: list[float] = []

    async def agent(index: int) -> None:
        await asyncio.sleep(index * 0.02)
        messages: list[Any] = []
        for _ in range(args.turns):
            messages.append({"role": "user", "content": QUESTION})
            began = time.perf_counter()
            messages.append({"role": "assistant", "content": await turn(index, messages)})
            seconds.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(agent(index) for index in range(args.agents)))
    return seconds, args.agents * args.turns * args.tokens / (time.perf_counter() - began)


async def measure_agents(bus: NatsBus, gateway: Gateway, args: argparse.Namespace) -> dict[str, Any]:
    keys = [await claim(bus, f"a{index}") for index in range(args.agents)]
    engine = PacedEngine("paced", [1])
    limits = httpx.Limits(max_connections=args.agents, max_keepalive_connections=args.agents)
    async with httpx.AsyncClient(timeout=120.0, limits=limits) as client:

        async def through(index: int, messages: list[Any]) -> str:
            body = {"model": "paced", "messages": messages, "max_tokens": args.tokens}
            headers = {"authorization": f"Bearer {keys[index]}"}
            answer = await client.post(f"{gateway.base_url}/chat/completions", json=body, headers=headers)
            answer.raise_for_status()
            return answer.json()["choices"][0]["message"]["content"]

        async def inside(index: int, messages: list[Any]) -> str:
            asked = Generation(str(index), [1], Sampling(max_tokens=args.tokens), frozenset())
            return "".join([WORDS[:4] async for _ in engine.generate(asked)])

        seconds, rate = await play(through, args)
        bare_seconds, bare_rate = await play(inside, args)
    (half, most), (bare_half, bare_most) = quantiles(seconds), quantiles(bare_seconds)
    return {
        "added_p50_ms": round(half - bare_half, 1),
        "added_p99_ms": round(most - bare_most, 1),
        "turn_p50_ms": round(half, 1),
        "engine_turn_p50_ms": round(bare_half, 1),
        "throughput_ratio": round(rate / bare_rate, 4),
        "tokens_per_second": round(rate, 1),
    }


async def ask_app(app: Any, key: str, body: bytes) -> tuple[bytes, float]:
    """A response's body, and the processor seconds that this process took for it."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {key}".encode())],
    }
    coming, sent = [{"type": "http.request", "body": body}], []

    async def receive() -> Any:
        return coming.pop() if coming else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    began = time.process_time()
    await app(scope, receive, send)
    seconds = time.process_time() - began
    assert sent[0]["status"] == 200, sent
    return sent[1]["body"], seconds


async def measure_growth(bus: NatsBus, gateway: Gateway, repeats: int) -> dict[str, Any]:
    app = build_app(gateway, Limits(GatewaySettings()))
    own: dict[int, list[float]] = {place: [] for place in PLACES}
    whole: dict[int, list[float]] = {place: [] for place in PLACES}
    for repeat in range(repeats):
        key, messages = await claim(bus, f"g{repeat}"), []
        for turn in range(1, PLACES[-1] + AROUND + 1):
            messages.append({"role": "user", "content": QUESTION})
            body = json.dumps({"model": "fast", "messages": messages, "max_tokens": REPLY_TOKENS}).encode()
            began = time.perf_counter()
            answer, seconds = await ask_app(app, key, body)
            took = time.perf_counter() - began
            messages.append(json.loads(answer)["choices"][0]["message"])
            for place in PLACES:
                if abs(turn - place) <= AROUND:
                    own[place].append(seconds)
                    whole[place].append(took)
    own_ms = {place: round(1000 * statistics.median(values), 2) for place, values in own.items()}
    return {
        "gateway_ms_per_turn": own_ms,
        "growth_ratio": round(own_ms[PLACES[-1]] / own_ms[PLACES[0]], 2),
        "turn_ms": {place: round(1000 * statistics.median(values), 2) for place, values in whole.items()},
        "body_bytes_at_last_turn": len(body),
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="agentjet-gateway-", ignore_cleanup_errors=True) as folder:
        async with EmbeddedServer(Path(folder), max_store_bytes=2 << 30) as server:
            bus = await NatsBus.connect(server.url, name="gateway")
            for spec in stream_specs(RUN, max_bytes=1 << 30):
                await bus.ensure_stream(spec)
            desk = ClaimDesk(bus, RUN, Board(RUN, lambda _: {}), BusClock(), SECRET)
            inference = await asyncio.create_subprocess_exec(sys.executable, __file__, "--inference", server.url)
            gateway = Gateway(bus, RUN, GatewaySettings())
            await gateway.start()
            try:
                async with bus.serve(
                    subject.authorize_service(RUN), answering(AuthorizeRequest, desk.authorize), queue="q"
                ):
                    growth = await measure_growth(bus, gateway, args.repeats)
                    return growth | await measure_agents(bus, gateway, args)
            finally:
                await gateway.close()
                inference.kill()
                await inference.wait()
                await bus.close()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--inference", metavar="URL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inference:
        asyncio.run(serve_inference(args.inference))
        return
    settings = {"num_agents": args.agents, "num_turns": args.turns, "num_tokens": args.tokens}
    pace = {"prefill_seconds": PACE["paced"][0], "step_seconds": PACE["paced"][1]}
    show(settings | pace | asyncio.run(measure(args)) | {"machine": machine()}, as_json=args.json)


if __name__ == "__main__":
    main()

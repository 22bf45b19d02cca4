"""Models served inside this process, for a few episodes to look at: engines, gateway and the in-memory bus.

Episodes take the same road as in a swarm (key, claim, call records); nothing is stored and no server is needed. Keys
are checked here, where no curriculum runs.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from agentjet.accounting.key import Key, sign, verify
from agentjet.bus.memory import MemoryBus
from agentjet.bus.protocol import Request
from agentjet.bus.record import put, read_as, read_plain, stream_specs
from agentjet.config import GatewaySettings, ModelSettings
from agentjet.errors import KeyRejectedError
from agentjet.gateway import Gateway
from agentjet.schemas import subject
from agentjet.schemas.call import Call
from agentjet.schemas.claim import Authorization, AuthorizeRequest, Claim
from agentjet.schemas.codec import encode
from agentjet.schemas.ids import RunId, group_id, new_run_id
from agentjet.schemas.sampling import Sampling
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import EpisodeKind, Ticket

_POOL = "local"
_MAX_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Pass:
    """What an episode plays with."""

    ticket: Ticket
    attempt: int
    key: str


@dataclass
class LocalSwarm:
    """A swarm of one process; `serve` opens one."""

    run: RunId
    bus: MemoryBus
    gateway: Gateway
    models: tuple[str, ...]
    base_url: str = ""
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    _indices: Any = field(default_factory=itertools.count)

    async def claim(
        self,
        task: dict[str, Any],
        *,
        kind: EpisodeKind = EpisodeKind.EVAL,
        seed: int = 0,
        sampling: Sampling | None = None,
        deadline_seconds: float = 600.0,
    ) -> Pass:
        """A ticket of its own group, claimed."""
        ticket = Ticket(
            run=self.run,
            pool=_POOL,
            group=group_id(_POOL, next(self._indices)),
            member=0,
            group_size=1,
            max_offers=1,
            kind=kind,
            models=self.models,
            task=task,
            seed=seed,
            deadline_seconds=deadline_seconds,
            sampling=sampling or Sampling(),
        )
        claim = Claim(ticket=ticket.without_task(), worker="command line")
        attempt = await put(self.bus, self.run, Stream.CLAIMS, subject.claim(self.run, ticket.id), claim)
        expires = time.time() + deadline_seconds
        return Pass(ticket, attempt, sign(self._secret, Key(self.run, ticket.id, attempt, expires)))

    async def calls(self, ticket: Ticket) -> list[Call]:
        """The calls of a ticket, in the order in which they were answered."""
        wildcard = subject.calls_of(self.run, ticket.id)
        stored = self.bus.scan(stream_name(self.run, Stream.CALLS), wildcard)
        return [await read_as(Call, self.bus, self.run, Stream.CALLS, message) async for message in stored]

    async def _authorize(self, request: Request) -> tuple[bytes, dict[str, str]]:
        text = read_plain(AuthorizeRequest, request).key
        try:
            key = verify(self._secret, text, run=self.run, now=time.time())
            answer = Authorization(
                granted=True, ticket=key.ticket, attempt=key.attempt, models=self.models, expires=key.expires
            )
        except KeyRejectedError as error:
            answer = Authorization(granted=False, reason=str(error))
        headers, body = encode(answer)
        return body, headers


@asynccontextmanager
async def serve(models: Mapping[str, ModelSettings]) -> AsyncIterator[LocalSwarm]:
    """Load the models and serve them while the context is open.

    Raises ModelNotFoundError, UnsupportedArchitectureError or EngineError when one can not be loaded, UserError for an
    unknown parser.
    """
    bus, run = MemoryBus(), new_run_id(_POOL)
    for spec in stream_specs(run, max_bytes=_MAX_BYTES):
        await bus.ensure_stream(spec)
    gateway = Gateway(bus, run, GatewaySettings())
    local = LocalSwarm(run, bus, gateway, tuple(models))
    async with AsyncExitStack() as stack:
        for name, of in models.items():
            await _start_model(stack, local, name, of)
        await stack.enter_async_context(bus.serve(subject.authorize_service(run), local._authorize, queue=_POOL))
        local.base_url = await gateway.start()
        stack.push_async_callback(gateway.close)
        yield local


async def _start_model(stack: AsyncExitStack, local: LocalSwarm, name: str, of: ModelSettings) -> None:
    # Imported here: they bring torch, which no other command needs.
    from agentjet.inference.engine_choice import engine_of
    from agentjet.inference.service import InferenceService
    from agentjet.inference.vllm_format import reply_format
    from agentjet.pretrained.tokenizer import load_tokenizer, stop_ids

    tokenizer = load_tokenizer(of.path)
    form = reply_format(tokenizer, tool_parser=of.tool_parser, reasoning_parser=of.reasoning_parser)
    engine = engine_of(of)
    await engine.start()
    stack.push_async_callback(engine.close)
    service = InferenceService(
        local.bus,
        local.run,
        name,
        engine,
        tokenizer,
        secret=local._secret,
        served_models=local.models,
        stop_ids=stop_ids(of.path),
        reply_format=form,
    )
    serving = asyncio.create_task(service.run(), name=f"inference {name}")
    stack.push_async_callback(_cancel, serving)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task

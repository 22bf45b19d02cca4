"""The asynchronous client of a swarm.

Example:
    >>> async with SwarmClient("nats://host:4222") as swarm:
    ...     async for episode in swarm.claim("guess"):
    ...         async with episode:
    ...             reply = await episode.call([{"role": "user", "content": episode.task["question"]}])
    ...             await episode.end(reward=float(reply["content"] == episode.task["answer"]))

It holds no secrets but the NATS credentials: keys come from the swarm, signed for one episode each. A gateway of its
own listens on loopback, so that any OpenAI client in the process can play.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

from agentjet.bus.handler import PostponeError
from agentjet.bus.nats import NatsBus
from agentjet.bus.protocol import Bus, Consumer, Delivery
from agentjet.bus.record import ask, read, read_as
from agentjet.client.episode import ClientEpisode
from agentjet.config.settings import GatewaySettings
from agentjet.errors import BusError, BusUnavailableError, ConfigError, RecordError, UsageError
from agentjet.gateway import Gateway
from agentjet.rollout.claiming import BUSY_SECONDS, SpentError, claim, worker_name
from agentjet.schemas import subject
from agentjet.schemas.claim import OfferReply, OfferRequest
from agentjet.schemas.ids import RunId, TicketId, check_token
from agentjet.schemas.ledger import RunFinish
from agentjet.schemas.subject import CURRICULUM, Stream, stream_name
from agentjet.schemas.task import Ticket

log = structlog.get_logger(__name__)

ACK_WAIT_SECONDS = 30.0
_FETCH_SECONDS = 1.5
_FULL_SECONDS = 1.0
_OFFER_SECONDS = 10.0
_STRANGE_SECONDS = 10.0
GONE_SECONDS = 60.0
"""How long `claim` waits for a run that can not be reached."""


class SwarmClient:
    """Plays episodes for a run.

    Args:
        url: `nats://host:port`.
        run: Id of the run; empty takes the newest on the server.
        user: Of the NATS server, where it asks for one.
        password: The user's.
        token: Of the NATS server.
        credentials: A `.creds` file.
        bus: A bus to use in place of `url`; it is not closed.
    """

    def __init__(
        self,
        url: str = "nats://127.0.0.1:4222",
        *,
        run: str = "",
        user: str = "",
        password: str = "",
        token: str = "",
        credentials: str | Path | None = None,
        bus: Bus | None = None,
    ) -> None:
        self.worker = worker_name()
        self._url, self._wanted_run, self._given_bus = url, run, bus
        self._user, self._password, self._token = user, password, token
        self._credentials = None if credentials is None else str(credentials)
        self._bus: Bus | None = None
        self._run = RunId("")
        self._gateway: Gateway | None = None
        self._opening = asyncio.Lock()
        self._claiming = asyncio.Lock()
        """Two who open the same group at a time must not supersede one another."""
        self._opened: dict[TicketId, ClientEpisode] = {}
        self._episodes: set[ClientEpisode] = set()

    @property
    def run(self) -> str:
        """Id of the run that is played for; empty before the client is opened."""
        return self._run

    async def __aenter__(self) -> Self:
        self._bus = self._given_bus or await NatsBus.connect(
            self._url,
            name=f"client {self.worker}",
            user=self._user or None,
            password=self._password or None,
            token=self._token or None,
            credentials=self._credentials,
        )
        try:
            self._run = await find_run(self._bus, self._wanted_run)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Lets go of tickets that are still held, and of the bus."""
        for episode in self._episodes:
            episode.drop()
        self._episodes.clear()
        self._opened.clear()
        if self._gateway is not None:
            await self._gateway.close()
            self._gateway = None
        if self._bus is not None and self._given_bus is None:
            await self._bus.close()
        self._bus = None

    async def claim(self, pool: str) -> AsyncGenerator[ClientEpisode, None]:
        """Episodes of a pool's own tasks, one after the other, until the run is over; waits while there is none.

        Raises:
            BusUnavailableError: The run could not be reached for `GONE_SECONDS`.
        """
        bus = self._connected()
        consumer = await bus.consumer(
            stream_name(self._run, Stream.TASKS),
            f"tasks-{check_token(pool, 'pool')}",
            subject=subject.tasks_of(self._run, pool),
            ack_wait_seconds=ACK_WAIT_SECONDS,
        )
        last_seen = time.monotonic()
        while True:
            episode = await self._next(consumer)
            if episode is not None:
                yield episode
            elif (is_over := await self._is_over(last_seen)) is None:
                continue
            elif is_over:
                return
            last_seen = time.monotonic()

    async def open(self, task: Mapping[str, Any], *, pool: str, group: str, n: int = 1) -> list[ClientEpisode]:
        """Episodes of a task of your own: `n` members of one group, whose rewards are compared with one another.

        Waits while the swarm has as many episodes as its learners can take. Asking again for a group gives the very
        episodes that this client has open; from another client it takes them over, a few times, and what ended before
        is left out.

        Args:
            task: Any JSON object; reward functions see it.
            pool: The pool that the episodes count for; one without tasks of its own.
            group: Your name of the task; it stands for these tickets for ever.
            n: Members.

        Raises:
            UsageError: The swarm refuses the task, or the group was taken over too often; the message says why.
            BusError: Nobody answers.
        """
        question = OfferRequest(
            run=self._run, pool=check_token(pool, "pool"), group=group, task=dict(task), size=n, worker=self.worker
        )
        while not (offer := await self._offer(question)).granted:
            if offer.reason not in ("full", "busy"):
                raise UsageError(f"the swarm refuses the task for pool {pool!r}: {offer.reason}")
            await asyncio.sleep(_FULL_SECONDS)
        # The offer's tickets may come without their task.
        tickets = [ticket.model_copy(update={"task": dict(task)}) for ticket in offer.tickets]
        async with self._claiming:
            self._opened = {of: one for of, one in self._opened.items() if not one.is_over and one.seconds_left > 0}
            episodes = [await self._open(ticket, group) for ticket in tickets]
        return [episode for episode in episodes if episode is not None]

    async def _open(self, ticket: Ticket, group: str) -> ClientEpisode | None:
        """The episode of an offered ticket; the one that is open here already, as another claim would supersede it."""
        if ticket.id in self._opened:
            return self._opened[ticket.id]
        until = time.monotonic() + _OFFER_SECONDS
        while True:
            try:
                episode = await self._take(ticket, None)
            except SpentError:
                raise UsageError(
                    f"group {group!r} was opened so often that its ticket {ticket.id} is given to nobody any more; it "
                    "is dead at its deadline. Open the task under another group name"
                ) from None
            except BusUnavailableError:
                raise
            except (PostponeError, BusError) as error:
                if time.monotonic() > until:
                    raise BusError(f"ticket {ticket.id} of group {group!r} can not be claimed: {error}") from None
                await asyncio.sleep(_FULL_SECONDS)
            else:
                if episode is not None:
                    self._opened[ticket.id] = episode
                return episode

    async def _offer(self, question: OfferRequest) -> OfferReply:
        """The curriculum's answer; one that is being started again is waited for."""
        to, until = subject.offer_service(self._run, question.pool), time.monotonic() + _OFFER_SECONDS
        while True:
            try:
                return await ask(self._connected(), to, question, OfferReply, timeout_seconds=_OFFER_SECONDS)
            except BusUnavailableError:
                raise
            except BusError as error:
                if time.monotonic() > until:
                    raise BusError(
                        f"nobody takes tasks for pool {question.pool!r} of run {self._run}: is its curriculum running, "
                        f"and is the pool in its configuration? ({error})"
                    ) from None
                log.warning("an offer was not answered; asking again", pool=question.pool, error=str(error))
            await asyncio.sleep(_FULL_SECONDS)

    async def _next(self, consumer: Consumer) -> ClientEpisode | None:
        for delivery in await consumer.fetch(1, _FETCH_SECONDS):
            try:
                ticket = await read_as(Ticket, self._connected(), self._run, Stream.TASKS, delivery.message)
                episode = await self._take(ticket, delivery)
            except PostponeError as error:
                await delivery.nak(error.delay_seconds)
            except BusUnavailableError:
                raise
            except BusError as error:
                log.warning("a ticket could not be claimed; it comes again", error=str(error))
                await delivery.nak(BUSY_SECONDS)
            except RecordError as error:
                # Of a newer AgentJet, most likely: others can play it.
                log.warning("a ticket can not be read here", subject=delivery.message.subject, error=str(error))
                await delivery.nak(_STRANGE_SECONDS)
            else:
                if episode is None:
                    await delivery.ack()
                return episode
        return None

    async def _is_over(self, last_seen: float) -> bool | None:
        """Whether the run is finished, so that no ticket will come; None while that can not be found out."""
        bus = self._connected()
        try:
            last = await bus.last(stream_name(self._run, Stream.LEDGER), subject.ledger(self._run, CURRICULUM))
            return last is not None and isinstance(await read(bus, self._run, Stream.LEDGER, last), RunFinish)
        except BusUnavailableError:
            raise
        except BusError as error:
            away_seconds = time.monotonic() - last_seen
            if away_seconds > GONE_SECONDS:
                raise BusUnavailableError(
                    f"run {self._run} could not be reached for {away_seconds:.0f} s ({error}); start it again with "
                    "`agentjet up`, or check the address"
                ) from None
            return None
        except RecordError:
            return False  # of a newer AgentJet

    async def _take(self, ticket: Ticket, delivery: Delivery | None) -> ClientEpisode | None:
        bus, gateway = self._connected(), await self._endpoint()
        claimed = await claim(bus, self._run, ticket, self.worker)
        if claimed is None:
            return None
        episode = ClientEpisode(bus, self._run, gateway, claimed, worker=self.worker, delivery=delivery)
        self._episodes = {one for one in self._episodes if not one.is_over} | {episode}
        return episode

    async def _endpoint(self) -> Gateway:
        async with self._opening:
            if self._gateway is None:
                gateway = Gateway(self._connected(), self._run, GatewaySettings())
                await gateway.start()
                self._gateway = gateway
            return self._gateway

    def _connected(self) -> Bus:
        if self._bus is None:
            raise UsageError("the swarm client is not open: use `async with SwarmClient(...) as swarm:`")
        return self._bus


async def find_run(bus: Bus, wanted: str = "") -> RunId:
    """The run of that id, or without one the run whose ledger was written to last.

    Raises:
        ConfigError: There is none; the message lists those that there are.
    """
    suffix = f"_{Stream.LEDGER.value}"
    names = [name for name in await bus.stream_names(subject.stream_prefix()) if name.endswith(suffix)]
    runs = {name.removeprefix(subject.stream_prefix()).removesuffix(suffix): name for name in names}
    if wanted:
        if wanted not in runs:
            raise ConfigError(f"there is no run {wanted!r} on this server; it has {', '.join(runs) or 'none'}")
        return RunId(wanted)
    if not runs:
        raise ConfigError("there is no run on this server; start one with `agentjet up`")
    times = {run: (await bus.stream_info(name)).last_time for run, name in runs.items()}
    return RunId(max(times, key=lambda run: times[run]))

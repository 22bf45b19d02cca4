"""An episode in a client's hands.

It ends exactly once: by `end`, by `abort`, or by leaving its `async with` block. Asking again gives the same reply and
has no further effect. Whatever was tried first is its end: an end that could not be stored is sent again as it was, and
never turns into an abort. Until then its ticket is held by a heartbeat.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import structlog

from agentjet.bus.protocol import Bus, Delivery
from agentjet.errors import BusError
from agentjet.gateway import Gateway
from agentjet.rollout.claiming import Claimed
from agentjet.rollout.ending import ended, store_end_in_time
from agentjet.rollout.stage import Play, openai_sampling
from agentjet.schemas.call_reward import rewards_by_call
from agentjet.schemas.episode import EndReply, Episode
from agentjet.schemas.ids import RunId
from agentjet.schemas.task import EpisodeKind
from agentjet.workers.pool import Failure

log = structlog.get_logger(__name__)

HEARTBEAT_SECONDS = 3.0


class ClientEpisode:
    """One episode to play. Made by `SwarmClient.claim` and `SwarmClient.open`."""

    def __init__(
        self, bus: Bus, run: RunId, gateway: Gateway, claimed: Claimed, *, worker: str, delivery: Delivery | None
    ) -> None:
        self.ticket = claimed.ticket
        self.attempt = claimed.attempt
        self.api_key = claimed.key
        """Of this episode only: calls made with it are this episode's."""
        self._bus, self._run, self._gateway, self._claimed = bus, run, gateway, claimed
        self._worker, self._delivery = worker, delivery
        self._transcript: list[dict[str, Any]] = []
        self._ending = asyncio.Lock()
        self._end_record: Episode | None = None
        """What was tried to be stored: it may have been."""
        self._reply: EndReply | None = None
        self._beat = asyncio.create_task(self._hold()) if delivery is not None else None

    @property
    def base_url(self) -> str:
        """Of an OpenAI-compatible API on this machine, `/v1` included."""
        return self._gateway.base_url

    @property
    def task(self) -> dict[str, Any]:
        """The task instance."""
        return self.ticket.task

    @property
    def models(self) -> tuple[str, ...]:
        """Names to ask for."""
        return self.ticket.models

    @property
    def model(self) -> str:
        """The first (often the only) model."""
        return self.ticket.models[0]

    @property
    def seed(self) -> int:
        """The same for all members of the group."""
        return self.ticket.seed

    @property
    def is_eval(self) -> bool:
        """The episode is an evaluation and trains nothing."""
        return self.ticket.kind is EpisodeKind.EVAL

    @property
    def sampling(self) -> dict[str, Any]:
        """The pool's sampling, as keyword arguments of `chat.completions.create`."""
        return openai_sampling(self.ticket.sampling)

    @property
    def calls(self) -> dict[str, tuple[str, ...]]:
        """Ids of the calls answered so far for each model, in order; empty once the episode is over."""
        return {model: tuple(own) for model, own in self._gateway.session(self.api_key).calls.items()}

    @property
    def is_over(self) -> bool:
        """It has ended."""
        return self._reply is not None

    @property
    def seconds_left(self) -> float:
        """Until the episode is given up by the swarm."""
        return self._claimed.seconds_left

    async def call(self, messages: Sequence[Mapping[str, Any]], *, model: str = "", **sampling: Any) -> dict[str, Any]:
        """Asks a model over the bus, without HTTP; returns the assistant message.

        Args:
            messages: OpenAI chat messages.
            model: One of `models`; empty takes the first.
            **sampling: Further fields of a chat completion request, over those of the pool.

        Raises:
            ApiError: What OpenAI's API would answer.
        """
        body = {"model": model or self.model, "messages": [dict(one) for one in messages], **self.sampling, **sampling}
        completion = await self._gateway.complete(self.api_key, body)
        return completion["choices"][0]["message"]

    def log(self, message: dict[str, Any]) -> None:
        """Adds a line to the episode's transcript, for people to read; it is never trained on."""
        self._transcript.append(dict(message))

    async def end(
        self,
        reward: float | None = None,
        *,
        call_rewards: Mapping[str, float] | Sequence[float] | None = None,
        metrics: Mapping[str, float] | None = None,
        result: Any = None,
    ) -> EndReply:
        """Ends the episode; without a reward the pool's function scores `result`.

        `call_rewards` are the rewards of single calls, for `algorithm.credit = "call"`: a number for every call, by id
        (see `calls`) or, where one model was called, in their order.

        Returns whether this end counts: False with `superseded` when another attempt ended first, with `dead` when the
        deadline had passed.

        A bus that is away is waited for, up to the deadline.

        Raises:
            BusError: The end could not be stored; ask again.
            CallRewardError: `call_rewards` do not fit the calls; the episode goes on.
        """
        by_call = {} if self.is_over else rewards_by_call(call_rewards, self.calls)
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        return await self._end(None if reward is None else float(reward), by_call, numbers, result, None)

    async def abort(self, why: str) -> EndReply:
        """Gives the episode up: it is offered again and gets no score."""
        return await self._end(None, {}, {}, None, Failure("AbortError", why, is_abort=True))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._reply is not None:
            return
        why = "the client left the episode without end()" if error is None else f"{type(error).__name__}: {error}"
        # Who is being cancelled wants to leave now: one try.
        is_patient = error is None or isinstance(error, Exception)
        try:
            await self._end(None, {}, {}, None, Failure("AbortError", why, is_abort=True), is_patient=is_patient)
        except BusError as problem:
            if error is None:
                raise
            log.warning("an end was not stored", ticket=self.ticket.id, error=str(problem))

    async def _end(
        self,
        reward: float | None,
        call_rewards: dict[str, float],
        metrics: dict[str, float],
        result: Any,
        failure: Failure | None,
        *,
        is_patient: bool = True,
    ) -> EndReply:
        async with self._ending:
            if self._reply is not None:
                return self._reply
            if self._end_record is None:
                seconds = time.monotonic() - self._claimed.since
                play = Play(reward, metrics, result, tuple(self._transcript), failure, "", seconds, call_rewards)
                captured = self._gateway.session(self.api_key)
                self._end_record = ended(self.ticket, self.attempt, captured, play, worker=self._worker)
            self._reply = await self._store(self._end_record, is_patient=is_patient)
            await self._let_go()
            self._gateway.forget(self.api_key)
            return self._reply

    async def _store(self, record: Episode, *, is_patient: bool) -> EndReply:
        try:
            return await store_end_in_time(
                self._bus, self._run, record, lambda: self._claimed.seconds_left if is_patient else 0.0
            )
        except BusError:
            raise
        except Exception:
            self._end_record = None  # it can not be written at all, so another may
            raise

    async def _let_go(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
        if self._delivery is not None:
            try:
                await self._delivery.ack()
            except BusError as error:
                # The end is stored: whoever gets the ticket again finds it there and drops the ticket.
                log.warning("could not acknowledge an ended ticket", ticket=self.ticket.id, error=str(error))

    async def _hold(self) -> None:
        while self._delivery is not None:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            try:
                await self._delivery.in_progress()
            except BusError as error:
                log.warning("could not hold a ticket", ticket=self.ticket.id, error=str(error))

    def drop(self) -> None:
        """Stops holding the ticket; after a while somebody else gets it. `SwarmClient` calls it when it closes."""
        if self._beat is not None:
            self._beat.cancel()

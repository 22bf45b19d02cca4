"""Ends of episodes: what an attempt says of itself, and storing it once.

The first stored end of a ticket wins for ever. An attempt that ends again gets the same answer; another attempt's end
is told `superseded`. An end without a single call of the ticket's own models is never a sample: it fails by name.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import structlog

from agentjet.bus.protocol import Bus
from agentjet.bus.record import put_once
from agentjet.errors import BusError, BusUnavailableError, CallRewardError, RecordError
from agentjet.rollout.stage import Play
from agentjet.schemas import subject
from agentjet.schemas.call_reward import rewards_by_call
from agentjet.schemas.episode import CONTEXT, PROMPT_TOO_LONG, EndReply, EndStatus, Episode, Fault
from agentjet.schemas.ids import RunId
from agentjet.schemas.subject import Stream
from agentjet.schemas.task import EpisodeKind, Ticket
from agentjet.workers.pool import Failure

log = structlog.get_logger(__name__)

_MAX_MESSAGE = 2_000
_STORE_AGAIN_SECONDS = 1.0

NO_CALLS = Fault(
    kind="no_model_calls",
    message="0 model calls captured: the agent has to call its models at policy.base_url with policy.api_key",
)
TOO_LONG = Fault(
    kind=PROMPT_TOO_LONG,
    message="the first prompt alone leaves no room in the model's context; the task is skipped",
)


class Captured(Protocol):
    """What a gateway knows of a key's calls."""

    @property
    def calls(self) -> Mapping[str, Sequence[str]]:
        """Answered calls for each model, in order."""
        ...

    @property
    def stop_reason(self) -> str:
        """`context` once a prompt left no room in a model's context, else empty."""
        ...


class Endpoint(Protocol):
    """The gateway, as far as playing needs it."""

    @property
    def base_url(self) -> str:
        """Of the OpenAI API, `/v1` included."""
        ...

    def session(self, key: str) -> Captured:
        """What a key has called so far."""
        ...

    def forget(self, key: str) -> None:
        """The key's episode is over."""
        ...


def ended(ticket: Ticket, attempt: int, captured: Captured, play: Play, *, worker: str) -> Episode:
    """The end of an attempt, from what its agent did and what the gateway saw."""
    status, fault = _verdict(ticket, captured, play)
    call_rewards: dict[str, float] = {}
    if status is EndStatus.COMPLETED:
        try:
            call_rewards = rewards_by_call(play.call_rewards, captured.calls)
        except CallRewardError as error:
            status, fault = EndStatus.FAILED, Fault(kind=type(error).__name__, message=str(error)[:_MAX_MESSAGE])
    return Episode(
        run=ticket.run,
        ticket=ticket,
        attempt=attempt,
        status=status,
        calls={model: tuple(calls) for model, calls in captured.calls.items() if calls},
        reward=play.reward,
        call_rewards=call_rewards,
        result=_with_text_keys(play.result),
        metrics=play.metrics,
        transcript=tuple(_with_text_keys(message) for message in play.transcript),
        stop_reason=captured.stop_reason,
        fault=fault,
        agent_digest=play.digest,
        worker=worker,
        seconds=play.seconds,
    )


def _with_text_keys(value: Any) -> Any:
    """What an agent gave, as a record can carry it: maps there have texts as keys, as JSON's have."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): _with_text_keys(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text_keys(one) for one in value]
    return value


def _verdict(ticket: Ticket, captured: Captured, play: Play) -> tuple[EndStatus, Fault | None]:
    # A judge or an opponent that answered is no call of the models that are played.
    is_silent = not any(captured.calls.get(model) for model in ticket.models)
    if is_silent and captured.stop_reason == CONTEXT:
        return EndStatus.FAILED, TOO_LONG
    if play.failure is not None:
        fault = Fault(kind=play.failure.kind, message=_within(play.failure))
        return (EndStatus.ABORTED if play.failure.is_abort else EndStatus.FAILED), fault
    if ticket.kind is EpisodeKind.TRAIN and is_silent:
        return EndStatus.FAILED, NO_CALLS
    return EndStatus.COMPLETED, None


def _within(failure: Failure) -> str:
    """The failure's sentence within the limit of a fault's message."""
    where = failure.sentence.removeprefix(failure.message)
    return failure.message[: _MAX_MESSAGE - len(where)] + where


async def store_end(bus: Bus, run: RunId, episode: Episode) -> EndReply:
    """Stores an end, or learns that there is one; BusError when neither could be found out."""
    ticket = episode.ticket.id
    stored = await put_once(bus, run, Stream.EPISODES, subject.episode(run, ticket), episode)
    if stored.is_ours:
        return EndReply(ticket=ticket, accepted=True)
    first = stored.record
    if not isinstance(first, Episode):
        raise RecordError(f"{subject.episode(run, ticket)} holds a {first.schema_name} record, no episode")
    if first.attempt == episode.attempt:
        return EndReply(ticket=ticket, accepted=True)
    reason = "dead" if first.status is EndStatus.DEAD else "superseded"
    return EndReply(ticket=ticket, accepted=False, reason=reason)


async def store_end_in_time(bus: Bus, run: RunId, episode: Episode, seconds_left: Callable[[], float]) -> EndReply:
    """As `store_end`, and again while the bus does not take it and there is time.

    The very same record every time: a try whose answer was lost may have been stored.

    Raises:
        BusUnavailableError: The bus is gone for good.
        BusError: The time is over.
    """
    while True:
        try:
            return await store_end(bus, run, episode)
        except BusUnavailableError:
            raise
        except BusError as error:
            if seconds_left() <= 0:
                raise
            log.warning("an end could not be stored yet", ticket=episode.ticket.id, error=str(error))
        await asyncio.sleep(_STORE_AGAIN_SECONDS)


def failed_play(kind: str, message: str) -> Play:
    """A play that never came to an end of its own."""
    return Play(None, {}, None, (), Failure(kind, message), "", 0.0)

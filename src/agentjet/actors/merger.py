"""The merger actor: the calls of a scored episode become one token prefix tree per model.

It writes exactly one record for each slot and model: a sample, or a tombstone. Which one is a function of the score, so
a redelivered score finds the same record already stored.
"""

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from agentjet.actors.actor import Actor
from agentjet.actors.process import main
from agentjet.bus.handler import ConsumeState, PostponeError, consume
from agentjet.bus.protocol import Bus, StoredMessage
from agentjet.bus.record import put_once, read_as
from agentjet.merging.timeline import merge_episode, tombstone
from agentjet.schemas import subject
from agentjet.schemas.call import Call
from agentjet.schemas.ids import CallId, RunId, TicketId, is_token
from agentjet.schemas.sample import Sample, Tombstone, TombstoneReason
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import EpisodeKind

CALL_WAIT_SECONDS = 60.0
INLINE_TOKENS = 4_096
"""An episode with fewer tokens is merged at once: that takes less time than to wake a thread takes others."""
CONCURRENCY = 64


class Merger:
    """One worker of the stage."""

    def __init__(self, bus: Bus, run: RunId) -> None:
        self._bus, self._run = bus, run
        self._first_missed: dict[tuple[TicketId, str], float] = {}
        """When a ticket's calls of a model were first found incomplete, monotonic."""
        self._state = ConsumeState(0, 0, 0, 0, "a score", time.monotonic())

    def metrics(self) -> dict[str, float]:
        """Counts since the start."""
        return {"num_merged": float(self._state.num_handled), "num_poisoned": float(self._state.num_poisoned)}

    def note(self, state: ConsumeState) -> None:
        """Keep the stage's state for the heartbeat."""
        self._state = state

    async def handle(self, message: StoredMessage) -> None:
        """Settle one score's slots."""
        score = await read_as(Score, self._bus, self._run, Stream.SCORES, message)
        ticket = score.ticket
        if ticket.kind is EpisodeKind.EVAL or not score.closes_slot:
            return
        for model in ticket.models:
            if score.outcome is not Outcome.SCORED:
                detail = score.fault.message if score.fault else score.outcome.value
                await self._store(tombstone(ticket, model, TombstoneReason.DEAD, detail))
            elif not score.calls.get(model):
                await self._store(tombstone(ticket, model, TombstoneReason.UNUSED, "the episode never called it"))
            else:
                calls = await self._calls(score, model)
                merge = partial(merge_episode, calls, ticket=ticket, model=model, score=score)
                num_tokens = sum(len(call.prompt_ids) + len(call.completion_ids) for call in calls)
                await self._store(merge() if num_tokens < INLINE_TOKENS else await asyncio.to_thread(merge))

    async def poison(self, message: StoredMessage, error: Exception) -> None:
        """Close the slots of a score that crashes the merger every time."""
        score = await read_as(Score, self._bus, self._run, Stream.SCORES, message)
        for model in score.ticket.models:
            self._first_missed.pop((score.ticket.id, model), None)
            await self._store(tombstone(score.ticket, model, TombstoneReason.POISON, str(error)))

    async def _calls(self, score: Score, model: str) -> list[Call]:
        """The attempt's calls; a call named by the score may still be on its way to this reader."""
        ticket, attempt = score.ticket.id, score.attempt
        # A client's end may name anything; what is no call id was never stored.
        named = [CallId(call) for call in score.calls[model] if is_token(call)]
        calls = await self._read([subject.call(self._run, model, ticket, attempt, call) for call in named])
        known = {call.call for call in calls}
        if any(call.parent is not None and call.parent not in known for call in calls):
            # A parent whose reply never reached the agent is not named.
            calls = await self._read([subject.calls_of(self._run, ticket, attempt, model)])
        missing = set(score.calls[model]) - {call.call for call in calls}
        if missing:
            since = self._first_missed.setdefault((ticket, model), time.monotonic())
            if time.monotonic() - since < CALL_WAIT_SECONDS:
                raise PostponeError(f"{ticket}: {len(missing)} calls are not stored yet")
        else:
            self._first_missed.pop((ticket, model), None)
        return calls

    async def _read(self, subjects: Sequence[str]) -> list[Call]:
        stored = await self._bus.last_many(stream_name(self._run, Stream.CALLS), subjects)
        return [await read_as(Call, self._bus, self._run, Stream.CALLS, message) for message in stored.values()]

    async def _store(self, record: Sample | Tombstone) -> None:
        to = subject.sample(self._run, record.model, record.slot)
        await put_once(self._bus, self._run, Stream.SAMPLES, to, record)


async def run(actor: Actor) -> None:
    """Until stopped."""
    merger = Merger(actor.bus, actor.run)
    actor.metrics, actor.state = merger.metrics, "busy"
    consumer = await actor.bus.consumer(stream_name(actor.run, Stream.SCORES), "merger")
    await consume(
        consumer, merger.handle, name="merger", on_poison=merger.poison, concurrency=CONCURRENCY, on_state=merger.note
    )


if __name__ == "__main__":
    main("merger", run)

"""Read model of a run as it is now: who is alive, what each waits for, how full the streams are, what is amiss.

`fetch` reads the facts; `assess` turns them into a `Status` and is a pure function. Liveness comes from presence only
and decides nothing: counts come from the streams, steps from the ledger. Ages compare the server's times with this
machine's clock, so they are as good as that clock.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentjet.accounting.ledger import LedgerView
from agentjet.bus.presence import live_actors
from agentjet.bus.protocol import Bus, ConsumerPlace, StreamInfo
from agentjet.errors import BusError
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.presence import Presence
from agentjet.schemas.subject import Stream, stream_name
from agentjet.ui.duration import duration
from agentjet.ui.ledger import read_ledgers

FULL_RATIO = 0.8
"""Fill of a stream from which on it is reported."""
SLOW_SECONDS = 30.0
"""Age of a stage's oldest input from which on the stage is slow."""
LAST_SEEN = "last_seen"
"""In the curriculum's heartbeat: when an actor of a kind and model was last alive, by `<kind> <model>`."""
_STAGES = {Stream.EPISODES: "reward", Stream.SCORES: "merger"}
"""Streams that one kind of actor reads by a durable consumer of its name, at once."""
_NOUNS = {"curriculum", "rollout", "merger"}
"""Actors whose name alone says that it is an actor."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What was read, as it was read."""

    run: RunId
    now: float
    """Seconds since the epoch."""
    presences: tuple[Presence, ...] = ()
    streams: Mapping[Stream, StreamInfo] = field(default_factory=dict)
    ledgers: Mapping[str, LedgerView] = field(default_factory=dict)
    """For each trained model that is known."""
    finish_reason: str | None = None
    """Why the run issues nothing more."""
    unknown: tuple[str, ...] = ()
    """Ledger records that this AgentJet can not read: what comes after them in their chain is not counted."""
    oldest: Mapping[Stream, Mapping[str, float]] = field(default_factory=dict)
    """When the oldest message was stored that a durable consumer has not settled."""


@dataclass(frozen=True, slots=True)
class WaitStatus:
    """Something an actor waits for."""

    what: str
    since: float
    seconds: float
    unblocked_by: str


@dataclass(frozen=True, slots=True)
class ActorStatus:
    """A live actor."""

    actor: str
    name: str
    models: tuple[str, ...]
    state: str
    host: str
    pid: int
    up_seconds: float
    waiting: tuple[WaitStatus, ...]
    metrics: Mapping[str, float]
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """A stream's state."""

    name: str
    num_messages: int
    num_bytes: int
    max_bytes: int
    fill_ratio: float
    first_sequence: int
    last_sequence: int
    age_seconds: float | None
    """Since its newest message; None while there has been none."""
    consumers: Mapping[str, int]
    """Messages that each durable consumer has not acknowledged."""
    waiting_seconds: Mapping[str, float]
    """Age of the oldest of them, for each consumer that has any."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model's learner and engines."""

    name: str
    step: int
    version: str
    """Newest in the ledger; empty before the first learner."""
    incarnation: int
    num_dropped_groups: int
    num_learners: int
    engines: Mapping[str, str]
    """Live engines and the version each serves."""
    staleness_steps: int | None
    """Steps by which the oldest engine is behind; None without engines."""
    agreement_nats: float | None
    """Mean difference between the log-probs of engines and learner; None while they were not compared."""
    agreement_step: int | None
    """Step before which they were compared last: long ago where no token of the learner's own weights comes in."""


@dataclass(frozen=True, slots=True)
class Status:
    """A run as it is now."""

    run: RunId
    time: float
    finish_reason: str | None
    problems: tuple[str, ...]
    """What needs a person, one sentence each."""
    actors: tuple[ActorStatus, ...]
    streams: tuple[StreamStatus, ...]
    models: tuple[ModelStatus, ...]


async def fetch(bus: Bus, run: RunId, *, now: float | None = None) -> Facts:
    """Read presence, streams and ledger of a run."""
    presences = tuple(await live_actors(bus, run))
    streams = dict(zip(Stream, await asyncio.gather(*(_stream(bus, run, one) for one in Stream)), strict=True))
    ledgers = await read_ledgers(bus, run)
    oldest = {stream: await _oldest(bus, info) for stream, info in streams.items() if info is not None}
    return Facts(
        run=run,
        now=time.time() if now is None else now,
        presences=presences,
        streams={stream: info for stream, info in streams.items() if info is not None},
        oldest=oldest,
        ledgers=ledgers.learners,
        unknown=ledgers.unknown,
        finish_reason=ledgers.curriculum.finish.reason if ledgers.curriculum.finish else None,
    )


async def _stream(bus: Bus, run: RunId, stream: Stream) -> StreamInfo | None:
    name = stream_name(run, stream)
    try:
        return await bus.stream_info(name, with_consumers=True)
    except BusError:
        if name in await bus.stream_names(name):
            raise
        return None  # the run is just being set up


async def _oldest(bus: Bus, info: StreamInfo) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in (name for name, count in info.consumers.items() if count):
        time_of_first = await _first_time(bus, info.name, info.places[name])
        if time_of_first is not None:
            found[name] = time_of_first
    return found


async def _first_time(bus: Bus, stream: str, place: ConsumerPlace) -> float | None:
    async for message in bus.scan(stream, place.subject, start=place.first_sequence):
        return message.time
    return None


def assess(facts: Facts) -> Status:
    """What the facts say."""
    actors = tuple(_actor(presence, facts.now) for presence in facts.presences)
    streams = tuple(_stream_status(info, facts, stream) for stream, info in facts.streams.items())
    models = tuple(_model(name, facts) for name in _model_names(facts))
    problems = tuple(_problems(facts, models))
    return Status(facts.run, facts.now, facts.finish_reason, problems, actors, streams, models)


def _actor(presence: Presence, now: float) -> ActorStatus:
    return ActorStatus(
        actor=presence.actor,
        name=presence.name,
        models=presence.models,
        state=presence.state,
        host=presence.host,
        pid=presence.pid,
        up_seconds=max(0.0, now - presence.started),
        waiting=tuple(
            WaitStatus(wait.what, wait.since, max(0.0, now - wait.since), wait.unblocked_by)
            for wait in presence.waiting
        ),
        metrics=presence.metrics,
        info=presence.info,
    )


def _stream_status(info: StreamInfo, facts: Facts, stream: Stream) -> StreamStatus:
    now = facts.now
    return StreamStatus(
        name=info.name,
        num_messages=info.num_messages,
        num_bytes=info.num_bytes,
        max_bytes=info.max_bytes,
        fill_ratio=_fill(info),
        first_sequence=info.first_sequence,
        last_sequence=info.last_sequence,
        age_seconds=max(0.0, now - info.last_time) if info.last_time else None,
        consumers=dict(info.consumers),
        waiting_seconds={name: max(0.0, now - time) for name, time in facts.oldest.get(stream, {}).items()},
    )


def _fill(info: StreamInfo) -> float:
    return info.num_bytes / info.max_bytes if info.max_bytes > 0 else 0.0


def _model_names(facts: Facts) -> list[str]:
    served = {model for one in facts.presences if one.actor in {"inference", "learner"} for model in one.models}
    return sorted({*facts.ledgers, *served})


def _model(name: str, facts: Facts) -> ModelStatus:
    view = facts.ledgers.get(name, LedgerView())
    engines = {one.name: str(one.info.get("version", "")) for one in _live(facts, "inference", name)}
    steps = [version.step for version in map(_parsed, engines.values()) if version is not None]
    learners = _live(facts, "learner", name)
    metrics = learners[0].metrics if learners else {}
    return ModelStatus(
        name=name,
        step=view.num_steps,
        version=str(view.head) if view.head else "",
        incarnation=view.incarnation,
        num_dropped_groups=view.num_dropped,
        num_learners=len(learners),
        engines=engines,
        staleness_steps=max(0, view.num_steps - min(steps)) if steps else None,
        agreement_nats=metrics.get("agreement_mean_nats"),
        agreement_step=int(metrics["agreement_step"]) if "agreement_step" in metrics else None,
    )


def _parsed(version: str) -> Version | None:
    try:
        return Version.parse(version)
    except ValueError:
        return None


def _live(facts: Facts, actor: str, model: str | None = None) -> list[Presence]:
    return [one for one in facts.presences if one.actor == actor and (model is None or model in one.models)]


def _problems(facts: Facts, models: Sequence[ModelStatus]) -> Iterator[str]:
    for stream, info in facts.streams.items():
        fill = _fill(info)
        # EVENTS drops its oldest by itself, and holds nobody up.
        if fill >= FULL_RATIO and stream is not Stream.EVENTS:
            yield (
                f"stream {info.name} is {fill:.0%} full: nothing more is issued above streams.admission_stop_ratio "
                "until it is purged; raise streams.max_gib or save checkpoints more often"
            )
    yield from facts.unknown
    if facts.finish_reason is not None:
        return
    if not facts.presences:
        yield "no actor is alive: the run is stopped, and `agentjet up` goes on with it"
        return
    yield from dict.fromkeys(problem for one in facts.presences for problem in one.problems)
    for model in models:
        if model.name in facts.ledgers and not model.num_learners:
            lost = _lost(facts, "learner", model.name)
            yield f"no learner is attached to model {model.name}: {lost}its samples are kept and wait"
        if not model.engines:
            calls = _backlog(facts, Stream.INFER, f"infer-{model.name}-any") or "its calls wait"
            yield f"no engine serves model {model.name}: {_lost(facts, 'inference', model.name)}{calls}"
    for stream, kind in _STAGES.items():
        since = facts.oldest.get(stream, {}).get(kind, facts.now)
        if _live(facts, kind) and facts.now - since >= SLOW_SECONDS:
            yield f"consumer {kind} of {stream.value} is slow: {_backlog(facts, stream, kind)}"
    for actor, waits, stream in (
        ("curriculum", "nothing is issued and no ticket can be claimed", None),
        ("rollout", "tickets wait, unless clients of their own play them", None),
        ("reward", "ended episodes are not scored", Stream.EPISODES),
        ("merger", "scored episodes do not reach the learners", Stream.SCORES),
        ("checkpoint", "what the learners save is neither verified nor pruned", None),
    ):
        if not _live(facts, actor):
            backlog = _backlog(facts, stream, actor) if stream else ""
            noun = "" if actor in _NOUNS else "actor "
            yield f"no {actor} {noun}is attached: {waits}" + (f"; {backlog}" if backlog else "")


def _lost(facts: Facts, actor: str, model: str) -> str:
    """Since when there is none, as far as the curriculum saw one."""
    for curriculum in _live(facts, "curriculum"):
        seen = curriculum.info.get(LAST_SEEN, {}).get(f"{actor} {model}")
        if seen is not None:
            noun = "engine" if actor == "inference" else actor
            return f"{noun} lost {duration(max(0.0, facts.now - seen))} ago, "
    return ""


def _backlog(facts: Facts, stream: Stream, consumer: str) -> str:
    """What a consumer has not settled, in words; empty when that is nothing."""
    info = facts.streams.get(stream)
    count = info.consumers.get(consumer, 0) if info else 0
    if not count:
        return ""
    noun = "call" if stream is Stream.INFER else "message"
    since = facts.oldest.get(stream, {}).get(consumer)
    age = "" if since is None else f", the oldest for {duration(max(0.0, facts.now - since))}"
    return f"{count} {noun}{'s' * (count != 1)} waiting{age}"

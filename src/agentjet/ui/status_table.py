"""A `Status` as tables for a terminal."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentjet.ui.duration import duration
from agentjet.ui.status import ActorStatus, ModelStatus, Status, StreamStatus

_MIB = 1024**2


def render(status: Status) -> RenderableType:
    """Everything that `agentjet status` shows."""
    return Group(*_parts(status))


def _parts(status: Status) -> Iterator[RenderableType]:
    head = f"run {status.run}"
    if status.finish_reason is not None:
        head += f": finished ({status.finish_reason})"
    yield Text(head, style="bold")
    for problem in status.problems:
        yield Text(f"! {problem}", style="yellow")
    if status.models:
        yield _models(status.models)
    if status.actors:
        yield _actors(status.actors)
    if status.streams:
        yield _streams(status.streams)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column.removesuffix(">"), justify="right" if column.endswith(">") else "left")
    return table


def _models(models: tuple[ModelStatus, ...]) -> Table:
    table = _table("model", "step>", "version", "learner", "engines", "behind>", "differ by>", "dropped groups>")
    for model in models:
        engines = ", ".join(f"{name} ({version or 'loading'})" for name, version in model.engines.items())
        table.add_row(
            model.name,
            str(model.step),
            model.version or "-",
            "attached" if model.num_learners else "none",
            engines or "none",
            "-" if model.staleness_steps is None else str(model.staleness_steps),
            _agreement(model),
            str(model.num_dropped_groups),
        )
    return table


def _agreement(model: ModelStatus) -> str:
    """How far engines and learner lie apart, and how old that is."""
    if model.agreement_nats is None:
        return "not compared"
    return f"{model.agreement_nats:.1e} nats (step {model.agreement_step})"


def _actors(actors: tuple[ActorStatus, ...]) -> Table:
    table = _table("actor", "models", "state", "up>", "waits for")
    for actor in actors:
        waits = "; ".join(
            f"{wait.what} ({duration(wait.seconds)})" + (f", by {wait.unblocked_by}" if wait.unblocked_by else "")
            for wait in actor.waiting
        )
        name = f"{actor.actor} {actor.host}:{actor.pid}"
        table.add_row(name, ", ".join(actor.models), actor.state, duration(actor.up_seconds), waits)
    return table


def _streams(streams: tuple[StreamStatus, ...]) -> Table:
    table = _table("stream", "messages>", "MiB>", "full>", "newest>", "not acknowledged")
    for stream in streams:
        consumers = ", ".join(_backlog(stream, name) for name in sorted(stream.consumers))
        age = "never" if stream.age_seconds is None else f"{duration(stream.age_seconds)} ago"
        table.add_row(
            stream.name.rpartition("_")[2],
            str(stream.num_messages),
            f"{stream.num_bytes / _MIB:.1f}",
            f"{stream.fill_ratio:.0%}",
            age,
            consumers,
        )
    return table


def _backlog(stream: StreamStatus, consumer: str) -> str:
    seconds = stream.waiting_seconds.get(consumer)
    return f"{consumer} {stream.consumers[consumer]}" + ("" if seconds is None else f" ({duration(seconds)})")

"""The report at the end of a run, for a reader and as one JSON line.

Everything comes in as data; it reads no bus and no file. What a model or an agent wrote is shown as text only: markup
and terminal control sequences in it have no effect.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from rich.align import Align
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from agentjet.schemas.episode import Episode
from agentjet.ui.curve import LearningCurve, TerminalCurve
from agentjet.ui.history import ModelHistory, RunHistory
from agentjet.ui.progress import clock_text

_SIDE_BY_SIDE_WIDTH = 96
_MAX_MESSAGES = 14
_MAX_CHARACTERS = 600
_ROLE_STYLES = {"assistant": "green", "user": "blue", "system": "dim", "tool": "yellow"}


@dataclass(frozen=True, slots=True)
class Report:
    """What the end of a run has to tell."""

    title: str
    curve: LearningCurve
    seconds: float
    audit: Mapping[str, int]
    """Counts `settled`, `lost` and `duplicated`; others are shown after them."""
    before: Episode | None = None
    """An episode of the untrained model, and `after` one of the trained model on the same task."""
    after: Episode | None = None
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    """Path of the newest checkpoint of each model."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """What to do next: purpose to command line."""
    plot: Path | None = None


def print_report(console: Console, report: Report) -> None:
    """Print the whole report, as wide as the console is."""
    console.print(Rule(Text(report.title, style="bold")))
    console.print(TerminalCurve(report.curve))
    if report.before is not None or report.after is not None:
        console.print()
        console.print(_comparison(report.before, report.after, console.width))
    console.print()
    console.print(_facts(report))
    # Never wrapped: a path or a command is there to be copied.
    for name, text in _copyable(report):
        console.print(Text(f"{name}: ", style="bold").append(text, style="cyan"), soft_wrap=True)


def _comparison(before: Episode | None, after: Episode | None, width: int) -> RenderableType:
    sides = [
        Group(Text(f"{name} training  {_verdict(episode)}", style="bold"), transcript(episode))
        for name, episode in (("Before", before), ("After", after))
        if episode is not None
    ]
    if len(sides) == 1 or width < _SIDE_BY_SIDE_WIDTH:
        return Group(*sides)
    grid = Table.grid(padding=(0, 2), expand=True)
    for _ in sides:
        grid.add_column(ratio=1)
    grid.add_row(*sides)
    return grid


def _verdict(episode: Episode) -> str:
    return episode.status.value if episode.reward is None else f"reward {episode.reward:.2f}"


def transcript(episode: Episode) -> RenderableType:
    """The episode's messages as bubbles: the model's to the right, everyone else's to the left."""
    messages = episode.transcript
    if not messages:
        return Text("The agent logged no messages.", style="dim")
    bubbles: list[RenderableType] = [_bubble(message) for message in messages[:_MAX_MESSAGES]]
    if len(messages) > _MAX_MESSAGES:
        bubbles.append(Text(f"... and {len(messages) - _MAX_MESSAGES} more messages", style="dim"))
    return Group(*bubbles)


def _bubble(message: Mapping[str, Any]) -> RenderableType:
    role = plain_text(str(message.get("role") or message.get("name") or "note"))
    content = message.get("content")
    if content is None:
        # An agent may log whatever it likes: show what is there.
        content = {key: value for key, value in message.items() if key != "role" and value is not None}
    text = plain_text(content if isinstance(content, str) else orjson.dumps(content, default=str).decode())
    if len(text) > _MAX_CHARACTERS:
        text = text[:_MAX_CHARACTERS] + " ..."
    panel = Panel(
        Text(text or "(empty)"),
        title=Text(role),
        title_align="left",
        border_style=_ROLE_STYLES.get(role, "magenta"),
        expand=False,
    )
    return Align(panel, "right" if role == "assistant" else "left")


def plain_text(text: str) -> str:
    """The text with everything that is not printable (but line ends) replaced."""
    return "".join(sign if sign.isprintable() or sign == "\n" else "\N{REPLACEMENT CHARACTER}" for sign in text)


def _facts(report: Report) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    audit = dict(report.audit)
    settled, lost, duplicated = (audit.pop(name, 0) for name in ("settled", "lost", "duplicated"))
    grid.add_row("Episodes", _accounting(settled, lost, duplicated))
    for name, count in audit.items():
        grid.add_row("", f"{count} {name.replace('_', ' ')}")
    grid.add_row("Time", clock_text(report.seconds))
    return grid


def _copyable(report: Report) -> list[tuple[str, str]]:
    plot = [("Curve", str(report.plot))] if report.plot is not None else []
    name = "Checkpoint" if len(report.checkpoints) == 1 else "Checkpoint of {}"
    return (
        plot + [(name.format(model), path) for model, path in report.checkpoints.items()] + [*report.commands.items()]
    )


def _accounting(settled: int, lost: int, duplicated: int) -> Text:
    text = Text(f"{settled} settled, ")
    text.append(f"{lost} lost", style="red" if lost else "green").append(", ")
    return text.append(f"{duplicated} counted twice", style="red" if duplicated else "green")


def summary(history: RunHistory, audit: Mapping[str, int], seconds: float) -> dict[str, Any]:
    """The figures of a run that `json_line` writes; rewards are means over its models' first and last steps."""
    models = [model for model in history.models.values() if model.steps]
    return {
        "steps": min((model.step for model in models), default=0),
        "episodes": history.counts.ended,
        "settled": audit.get("settled", 0),
        "lost": audit.get("lost", 0),
        "duplicated": audit.get("duplicated", 0),
        "reward_first": _mean([_edge(model, "reward_mean", 0) for model in models]),
        "reward_last": _mean([_edge(model, "reward_mean", -1) for model in models]),
        "merge_token_ratio": _mean([y for model in models for _, y in model.series("merge_token_ratio")]),
        "seconds": round(seconds, 3),
    }


def _edge(model: ModelHistory, name: str, index: int) -> float | None:
    values = model.series(name)
    return values[index][1] if values else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return round(math.fsum(known) / len(known), 6) if known else None


def json_line(figures: Mapping[str, Any], **extras: Any) -> str:
    """One line of JSON without its line end; figures that are not finite become null."""
    return orjson.dumps({**figures, **extras}, default=str, option=orjson.OPT_NON_STR_KEYS).decode()

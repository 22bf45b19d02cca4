"""Live progress of a run: a small panel on a terminal, one plain line a step elsewhere.

Invariants:

- It reads a `RunHistory` and presence; it never raises for what a run may report (no step yet, NaN, a terminal that
  shrinks or goes away): a display must not stop a run.
- Everything is drawn by `refresh`, on the caller's thread; the history may change in between.
"""

import math
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentjet.schemas.presence import Presence
from agentjet.ui.curve import RATIO_PREFIX, plain_name
from agentjet.ui.history import EvalPoint, ModelHistory, RunHistory, StepPoint

_PANEL_WIDTH = 100
_PROBLEM_SECONDS = 30.0
"""Least time between two plain lines on what is wrong."""
_PACE_STEPS = 5
"""Steps from which the time to go is estimated."""
_LONG_WAIT_SECONDS = 60.0
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=oO#@"
_GENERATION = "generation_tokens_per_second"
_FIGURES = (
    (_GENERATION, "generation", "{:.0f} tok/s"),
    ("tokens_per_second", "training", "{:.0f} tok/s"),
    ("merge_token_ratio", "merge", "{:.2f}x"),
    ("staleness_mean", "staleness", "{:.1f}"),
    ("step_seconds", "step", "{:.1f} s"),
)
"""Metric of a step, its label, and how it is written."""
_FIGURE_ROWS = {"speed": ("generation", "training", "step"), "batch": ("merge", "staleness")}
"""The figures' rows in the panel."""
_SPARK_WIDTH = 32


class Progress:
    """Shows a run while its context is open; call `refresh` when something changed, and about once a second."""

    def __init__(
        self,
        console: Console,
        history: RunHistory,
        *,
        num_steps: int,
        title: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`num_steps` 0: the run has no end."""
        self._console, self._history = console, history
        self._num_steps, self._title, self._clock = num_steps, title, clock
        self._presence: Sequence[Presence] = ()
        self._live: Live | None = None
        self._size: ConsoleDimensions = console.size
        self._is_off = False
        self._printed_steps: dict[str, int] = {}
        self._printed_evals: set[int] = set()
        self._printed_problems = -math.inf

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(get_renderable=self.render, console=self._console, auto_refresh=False, transient=True)
            self._guard(self._live.start)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._live is not None:
            self._is_off = False
            self._guard(self._live.stop)
            self._live = None
        else:
            self.refresh()

    def refresh(self, presence: Sequence[Presence] | None = None) -> None:
        """Draw again, with what the actors last reported."""
        if presence is not None:
            self._presence = presence
        self._guard(self._print_lines if self._live is None else self._redraw)

    def render(self) -> RenderableType:
        """The panel."""
        models = list(self._history.models.values()) or [ModelHistory("")]
        parts = [part for model in models for part in (self._head(model), self._model_facts(model))]
        counts, facts = self._history.counts, _grid()
        episodes = f"{counts.issued} issued, {counts.ended} ended, {counts.scored} scored"
        episodes += f", {counts.failed} failed" if counts.failed else ""
        facts.add_row("episodes", Text(f"{episodes}, {counts.settled} trained"))
        for point in self._history.evals[-1:]:
            facts.add_row("evaluation", Text(_eval_text(point)))
        for name, what in _actor_rows(self._presence, self._clock()):
            facts.add_row(Text(name), what)
        problems = [Text(f"! {problem}", style="bold yellow") for problem in self._problems()]
        width = min(self._console.width, _PANEL_WIDTH)
        title = Text(self._title, style="bold")
        return Panel(Group(*parts, facts, *problems), title=title, title_align="left", width=width, border_style="blue")

    def _head(self, model: ModelHistory) -> RenderableType:
        """Step, bar and time to go in one line."""
        left = seconds_left(model, self._num_steps, self._clock())
        name = f"{model.name}  " if len(self._history.models) > 1 else ""
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        line.add_row(
            Text(f"{name}step {model.step}" + (f"/{self._num_steps}" if self._num_steps else ""), style="bold"),
            ProgressBar(total=self._num_steps, completed=model.step) if self._num_steps else "",
            Text("" if left is None else f"ETA {clock_text(left)}"),
        )
        return line

    def _model_facts(self, model: ModelHistory) -> RenderableType:
        rewards = [value for _, value in model.series("reward_mean")]
        spark = sparkline(rewards, _SPARK_WIDTH, is_ascii=self._console.options.ascii_only)
        reward = Text(f"{rewards[-1]:.3f}" if rewards else "no step yet", style="bold cyan")
        for label, text in _ratio_texts(model.steps[-1:]):
            reward.append(f"  {label} ", style="not bold default").append(text, style="green")
        facts, figures = _grid(), self._figures(model)
        facts.add_row("reward", reward.append(f"  {spark}", style="not bold cyan"))
        for name, labels in _FIGURE_ROWS.items():
            found = "  ".join(f"{label} {text}" for label, text in figures if label in labels)
            if found:
                facts.add_row(name, Text(found))
        return facts

    def _figures(self, model: ModelHistory) -> list[tuple[str, str]]:
        """Label and text of the newest figures; what engines generate is asked of them where no step says it."""
        values = {name: model.latest(name) for name, _, _ in _FIGURES}
        speeds = [
            one.metrics.get("tokens_per_second", 0.0)
            for one in self._presence
            if one.actor == "inference" and model.name in one.models
        ]
        if values[_GENERATION] is None and math.isfinite(sum(speeds)) and sum(speeds) > 0:
            values[_GENERATION] = sum(speeds)
        return [(label, form.format(value)) for name, label, form in _FIGURES if (value := values[name]) is not None]

    def _problems(self) -> list[str]:
        """What the actors say needs a person, each sentence once."""
        return list(dict.fromkeys(problem for one in self._presence for problem in one.problems))

    def _redraw(self) -> None:
        if self._live is None:
            return
        if self._console.size != self._size:
            # A narrower terminal has wrapped the last frame, so that moving the cursor up no longer finds its top.
            self._size = self._console.size
            self._console.clear()
        self._live.refresh()

    def _print_lines(self) -> None:
        """Print what is new, evaluations after the step that they follow."""
        models = self._history.models
        lines: list[tuple[int, str]] = []
        for model in models.values():
            new = [point for point in model.steps if point.sequence > self._printed_steps.get(model.name, 0)]
            for point in new:
                self._printed_steps[model.name] = point.sequence
                lines.append((point.step, step_line(model, point, self._num_steps, is_named=len(models) > 1)))
        for point in self._history.evals:
            if point.is_complete and point.step not in self._printed_evals:
                self._printed_evals.add(point.step)
                lines.append((point.step, f"evaluation {_eval_text(point)}"))
        for _, line in sorted(lines, key=itemgetter(0)):
            self._console.print(Text(line), soft_wrap=True)
        self._print_problems()

    def _print_problems(self) -> None:
        """Their counts rise all the time: said at once, and then now and then."""
        problems, now = self._problems(), self._clock()
        if not problems:
            self._printed_problems = -math.inf
        elif now - self._printed_problems >= _PROBLEM_SECONDS:
            self._printed_problems = now
            for problem in problems:
                self._console.print(Text(f"! {problem}"), soft_wrap=True)

    def _guard(self, draw: Callable[[], None]) -> None:
        """A terminal that is gone, or can not encode a sign, ends the display and nothing else."""
        if self._is_off:
            return
        try:
            draw()
        except (OSError, UnicodeError, SystemExit):  # rich leaves the program when a pipe's reader has gone
            self._is_off = True


def step_line(model: ModelHistory, point: StepPoint, num_steps: int, *, is_named: bool = False) -> str:
    """One line of plain text on a step."""
    reward = point.value("reward_mean")
    words = [f"{model.name}:" if is_named else "", f"step {point.step}" + (f"/{num_steps}" if num_steps else "")]
    words.append("skipped: the gradient was not finite" if point.is_skipped else "")
    words.append("" if reward is None else f"reward {reward:.3f}")
    words += [f"{label} {text}" for label, text in _ratio_texts([point])]
    words += [
        f"{label} {form.format(value)}" for name, label, form in _FIGURES if (value := point.value(name)) is not None
    ]
    left = seconds_left(model, num_steps, point.time) if model.steps and point is model.steps[-1] else None
    words.append(f"ETA {clock_text(left)}" if left else "")
    return "  ".join(word for word in words if word)


def seconds_left(model: ModelHistory, num_steps: int, now: float) -> float | None:
    """Estimated from the pace of the last steps; None before a pace is known, or without an end."""
    recent = [point for point in model.steps if point.time >= model.started][-_PACE_STEPS - 1 :]
    since = recent[0].time if len(recent) > 1 else model.started
    if not recent or not num_steps or since <= 0 or recent[-1].time <= since:
        return None
    pace = (recent[-1].time - since) / max(len(recent) - 1, 1)
    # The clocks of bus and terminal may differ: the step under way counts for one step at most.
    under_way = min(max(now - recent[-1].time, 0.0), pace)
    return max((num_steps - model.step) * pace - under_way, 0.0)


def clock_text(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: Sequence[float], width: int, *, is_ascii: bool = False) -> str:
    """The last `width` finite values as blocks between their least and greatest."""
    blocks = _ASCII_BLOCKS if is_ascii else _BLOCKS
    shown = values[-width:]
    if not shown:
        return ""
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(blocks[round((value - low) / span * (len(blocks) - 1))] for value in shown)


def _grid() -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True, style="dim", min_width=10)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    return grid


def _ratio_texts(points: Sequence[StepPoint]) -> list[tuple[str, str]]:
    """Label and text of the clients' shares in the last point."""
    return [
        (plain_name(name), f"{value:.0%}")
        for point in points[-1:]
        for name in sorted(point.metrics)
        if name.startswith(RATIO_PREFIX) and name.endswith("_ratio") and (value := point.value(name)) is not None
    ]


def _eval_text(point: EvalPoint) -> str:
    none = "no episode was scored, see `agentjet dead ls`" if point.is_complete else ""
    reward = none if point.reward_mean is None else f"reward {point.reward_mean:.3f}"
    shares = [f"{plain_name(name)} {value:.0%}" for name, value in point.metrics.items() if name.endswith("_ratio")]
    progress = "" if point.is_complete else f"{point.num_closed} of {point.num_slots} played"
    return "  ".join(part for part in (f"at step {point.step}:", reward, *shares, progress) if part)


def _actor_rows(presence: Sequence[Presence], now: float) -> list[tuple[str, Text]]:
    """One row for each kind of actor: how many, their state, and the longest wait."""
    rows: list[tuple[str, Text]] = []
    for kind in dict.fromkeys(one.actor for one in sorted(presence, key=lambda one: one.actor)):
        actors = [one for one in presence if one.actor == kind]
        waits = sorted((wait for one in actors for wait in one.waiting), key=lambda wait: wait.since)
        states = sorted({one.state for one in actors} - ({"waiting"} if waits else set()))
        text = Text(", ".join(states))
        if waits:
            wait = f"waits {max(now - waits[0].since, 0):.0f} s for {waits[0].what}"
            text.append((", " if states else "") + wait, style="yellow")
        rows.append((kind if len(actors) == 1 else f"{kind} x{len(actors)}", text))
    return rows

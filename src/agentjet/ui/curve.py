"""The learning curve: its data, and how it is drawn in a terminal.

`LearningCurve` is what the terminal (here) and the picture (`plot`) both draw. Drawing takes the width that it is
given, and plain ASCII where the terminal can not show braille.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from agentjet.ui.history import ModelHistory, RunHistory

Points = Sequence[tuple[float, float]]
"""(step, value), finite, in order of the step."""

RATIO_PREFIX = "episode/"
COLORS = ("cyan", "green", "yellow", "magenta", "blue", "red")
_MARKS = "*ox+#%"


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """Values over training steps."""

    rewards: Mapping[str, Points] = field(default_factory=dict)
    """Mean reward of each step, by label."""
    ratios: Mapping[str, Points] = field(default_factory=dict)
    """Shares between 0 and 1 (wins, valid replies), by label."""
    evals: Mapping[str, Points] = field(default_factory=dict)
    """Mean reward of evaluations, by label."""
    references: Mapping[str, float] = field(default_factory=dict)
    """Rewards to compare with, drawn as level lines."""

    @classmethod
    def of(cls, history: RunHistory, references: Mapping[str, float] | None = None) -> "LearningCurve":
        """The curve of a run; with several models each has its own reward line."""
        models = [model for model in history.models.values() if model.steps]
        rewards = {_reward_label(model, len(models)): model.series("reward_mean") for model in models}
        # Models of one run share their episodes, so that one model's episode metrics speak for all.
        ratios = _ratios(models[0]) if models else {}
        evals = [(float(e.step), e.reward_mean) for e in history.evals if e.reward_mean is not None]
        return cls(
            rewards={label: points for label, points in rewards.items() if points},
            ratios=ratios,
            evals={"evaluation": evals} if evals else {},
            references=dict(references or {}),
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw but references."""
        return not any(points for group in (self.rewards, self.ratios, self.evals) for points in group.values())

    def step_range(self) -> tuple[float, float]:
        """First and last step; at least one step wide."""
        steps = [x for group in (self.rewards, self.ratios, self.evals) for points in group.values() for x, _ in points]
        low, high = min(steps, default=0.0), max(steps, default=1.0)
        return low, max(high, low + 1)

    def reward_range(self) -> tuple[float, float]:
        """Limits of the reward axis: 0 to 1 where that holds everything."""
        values = [y for group in (self.rewards, self.evals) for points in group.values() for _, y in points]
        values += [value for value in self.references.values() if math.isfinite(value)]
        return min(0.0, *values, 0.0), max(1.0, *values, 1.0)


def _reward_label(model: ModelHistory, num_models: int) -> str:
    return "reward" if num_models == 1 else f"reward {model.name}"


def _ratios(model: ModelHistory) -> dict[str, Points]:
    """Episode metrics that stay within 0 and 1, by their plain names."""
    found = {plain_name(name): model.series(name) for name in model.metric_names(RATIO_PREFIX)}
    return {name: points for name, points in found.items() if points and all(0 <= y <= 1 for _, y in points)}


def plain_name(metric: str) -> str:
    """`episode/win_ratio` is "win"."""
    return metric.removeprefix(RATIO_PREFIX).removesuffix("_ratio").replace("_", " ")


class TerminalCurve:
    """A learning curve as a rich renderable, as wide as it may be."""

    def __init__(self, curve: LearningCurve, *, height: int = 11, max_width: int = 110) -> None:
        self._curve = curve
        self._height = max(height, 3)
        self._max_width = max_width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._curve.is_empty:
            yield Text("No step has been taken yet: there is no curve to draw.", style="dim")
            return
        low, high = self._curve.reward_range()
        axis = max(len(_number(low)), len(_number(high))) + 1
        width = max(min(options.max_width, self._max_width) - axis - 1, 8)
        canvas = _Canvas(width, self._height, self._curve.step_range(), (low, high), is_ascii=options.ascii_only)
        legend = self._draw(canvas)
        for row, line in enumerate(canvas.lines()):
            share = 1 - row / (self._height - 1)
            is_labelled = row in (0, self._height // 2, self._height - 1)
            label = _number(low + share * (high - low)) if is_labelled else ""
            yield Text.assemble((label.rjust(axis), "dim"), ("|" if options.ascii_only else "│", "dim"), line)
        first, last = (f"{step:g}" for step in self._curve.step_range())
        yield Text(" " * (axis + 1) + first + f"step {last}".rjust(width - len(first)), style="dim")
        yield Columns(legend, padding=(0, 2))

    def _draw(self, canvas: "_Canvas") -> list[Text]:
        """Draw everything; returns the legend."""
        mark = "E" if canvas.is_ascii else "◆"
        legend: list[Text] = []
        low, high = self._curve.reward_range()
        references = {label: value for label, value in self._curve.references.items() if math.isfinite(value)}
        dash = "-" if canvas.is_ascii else "┄"
        for value in references.values():
            canvas.level(value, "dim", dash)
        lines = dict(self._curve.rewards)
        # Shares have the reward's axis only where that is 0 to 1.
        lines |= self._curve.ratios if (low, high) == (0.0, 1.0) else {}
        for number, (label, points) in reversed(list(enumerate(lines.items()))):  # the reward comes last, on top
            color, sign = COLORS[number % len(COLORS)], _MARKS[number % len(_MARKS)] if canvas.is_ascii else "─"
            canvas.line(points, color, sign)
            legend.insert(0, Text(f"{sign} {label} {points[-1][1]:.2f}", style=color))
        for label, points in self._curve.evals.items():
            canvas.marks(points, "bold white", mark)
            legend.append(Text(f"{mark} {label} {points[-1][1]:.2f}", style="bold white"))
        legend += [Text(f"{dash} {label} {value:.2f}", style="dim") for label, value in references.items()]
        return legend


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.3g}"


_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""[row, column] bits of the dots of a braille character (Unicode block U+2800)."""


class _Canvas:
    """A grid of characters, each of 2 x 4 dots; what is drawn later covers what was drawn before."""

    def __init__(
        self, width: int, height: int, steps: tuple[float, float], values: tuple[float, float], *, is_ascii: bool
    ) -> None:
        self.is_ascii = is_ascii
        self._width, self._height = width, height
        self._steps, self._values = steps, values
        self._cells: list[list[tuple[str, str]]] = [[(" ", "")] * width for _ in range(height)]

    def lines(self) -> Iterable[Text]:
        """The rows from the top."""
        for row in self._cells:
            runs = ((style, "".join(sign for sign, _ in run)) for style, run in groupby(row, key=itemgetter(1)))
            yield Text.assemble(*((text, style) for style, text in runs))

    def level(self, value: float, style: str, sign: str) -> None:
        """A level line over the whole width."""
        self._cells[self._dot(self._steps[0], value)[1] // 4] = [(sign, style)] * self._width

    def line(self, points: Points, style: str, sign: str) -> None:
        """Straight lines from point to point."""
        if not points:
            return
        dots = [self._dot(x, y) for x, y in points]
        for (x0, y0), (x1, y1) in zip(dots, dots[1:] or dots, strict=False):
            count = max(abs(x1 - x0), abs(y1 - y0), 1)
            for i in range(count + 1):
                self._set(x0 + round((x1 - x0) * i / count), y0 + round((y1 - y0) * i / count), style, sign)

    def marks(self, points: Points, style: str, sign: str) -> None:
        """One character at each point."""
        for x, y in points:
            column, row = self._dot(x, y)
            self._cells[row // 4][column // 2] = (sign, style)

    def _set(self, column: int, row: int, style: str, sign: str) -> None:
        cell_row, cell_column = row // 4, column // 2
        if not self.is_ascii:
            before, before_style = self._cells[cell_row][cell_column]
            # Dots of another line give way: a character has one color.
            bits = ord(before) - 0x2800 if before_style == style and ord(before) >= 0x2800 else 0
            sign = chr(0x2800 + (bits | _DOTS[row % 4][column % 2]))
        self._cells[cell_row][cell_column] = (sign, style)

    def _dot(self, x: float, y: float) -> tuple[int, int]:
        """Column and row of a point, counted in dots from the top left, kept within the grid."""
        across = (x - self._steps[0]) / (self._steps[1] - self._steps[0])
        up = (y - self._values[0]) / (self._values[1] - self._values[0])
        columns, rows = self._width * 2 - 1, self._height * 4 - 1
        return round(min(max(across, 0), 1) * columns), round((1 - min(max(up, 0), 1)) * rows)

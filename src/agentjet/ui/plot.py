"""The learning curve as a PNG.

Draws on a figure of its own (Agg, no pyplot), so that it holds no global state and needs no display.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from agentjet.ui.curve import LearningCurve, Points

REWARD_COLORS = ("#1f5fa8", "#b0402a", "#6a3d9a", "#444444")
RATIO_COLORS = ("#2f9e44", "#e8890c", "#9c36b5", "#0c8599")
SMOOTHING_STEPS = 5


def save_plot(
    curve: LearningCurve, path: Path, *, title: str, subtitle: str = "", size_pixels: tuple[int, int] = (1280, 760)
) -> Path:
    """Write the curve as a PNG of `size_pixels` (width, height); returns the path.

    OSError when it can not be written.
    """
    dpi = 128
    figure = Figure(figsize=(size_pixels[0] / dpi, size_pixels[1] / dpi), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shares = axes.twinx() if curve.ratios else None
    _draw_lines(axes, shares, curve)
    _draw_references(axes, curve)
    _dress(axes, curve, title, subtitle)
    if shares is not None:
        _dress_shares(shares, axes, curve)
    _legend(axes, shares)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def smooth(points: Points, width: int = SMOOTHING_STEPS) -> list[tuple[float, float]]:
    """Mean over `width` points around each point (fewer at the ends), so that the line does not lag behind."""
    half = width // 2
    windows = [points[max(0, i - half) : i + half + 1] for i in range(len(points))]
    return [(x, sum(y for _, y in near) / len(near)) for (x, _), near in zip(points, windows, strict=True)]


def _draw_lines(axes: Axes, shares: Axes | None, curve: LearningCurve) -> None:
    for color, (label, points) in zip(_cycle(REWARD_COLORS, len(curve.rewards)), curve.rewards.items(), strict=True):
        _line(axes, points, color, label, width=2.6)
    if shares is not None:
        for color, (label, points) in zip(_cycle(RATIO_COLORS, len(curve.ratios)), curve.ratios.items(), strict=True):
            _line(shares, points, color, f"{label} (right axis)", width=1.7)
    for points in curve.evals.values():
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, "D", color="#111111", markersize=7, markerfacecolor="#ffd43b", label="evaluation", zorder=6)


def _line(axes: Axes, points: Points, color: str, label: str, width: float) -> None:
    """The values faintly and their running mean boldly."""
    if not points:
        return
    is_short = len(points) < 3
    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, color=color, alpha=0.3, linewidth=1, marker="o", markersize=5 if is_short else 2.5)
    xs, ys = zip(*smooth(points), strict=True)
    axes.plot(xs, ys, color=color, linewidth=width, label=label, solid_capstyle="round", zorder=4)


def _draw_references(axes: Axes, curve: LearningCurve) -> None:
    first, _ = curve.step_range()
    low, high = curve.reward_range()
    for label, value in curve.references.items():
        axes.axhline(value, color="#868e96", linewidth=1.2, linestyle=(0, (5, 4)), zorder=1)
        axes.annotate(
            f"{label}: {value:.2f}",
            (first, value),
            xytext=(2, -11 if value > low + 0.9 * (high - low) else 4),
            textcoords="offset points",
            color="#495057",
            fontsize=9,
            zorder=7,
        )


def _dress(axes: Axes, curve: LearningCurve, title: str, subtitle: str) -> None:
    low, high = curve.reward_range()
    first, last = curve.step_range()
    axes.set_ylim(low - 0.03 * (high - low), high + 0.05 * (high - low))
    axes.set_xlim(first - 0.015 * (last - first), last + 0.015 * (last - first))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("training step")
    axes.set_ylabel("mean reward of the step's episodes")
    axes.grid(color="#dee2e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    # A dollar sign in a run's name is no formula.
    axes.set_title(title, fontsize=14, fontweight="bold", loc="left", pad=24 if subtitle else 10, parse_math=False)
    if subtitle:
        axes.text(
            0, 1.02, subtitle, transform=axes.transAxes, fontsize=10, color="#495057", va="bottom", parse_math=False
        )
    if curve.is_empty:
        axes.text(0.5, 0.5, "no step has been taken yet", transform=axes.transAxes, ha="center", color="#868e96")


def _dress_shares(shares: Axes, axes: Axes, curve: LearningCurve) -> None:
    low, high = curve.reward_range()
    # With rewards between 0 and 1 both axes have the same scale.
    shares.set_ylim(*(axes.get_ylim() if (low, high) == (0.0, 1.0) else (-0.03, 1.05)))
    shares.yaxis.set_major_formatter(PercentFormatter(1.0))
    shares.set_ylabel("share of episodes or replies")
    shares.spines[["top", "left"]].set_visible(False)


def _legend(axes: Axes, shares: Axes | None) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if shares is not None:
        more_handles, more_labels = shares.get_legend_handles_labels()
        handles, labels = handles + more_handles, labels + more_labels
    if handles:
        top = shares or axes
        legend = top.legend(handles, labels, loc="lower right", framealpha=0.9, edgecolor="#dee2e6")
        legend.set_title(f"bold: mean of {SMOOTHING_STEPS} steps")
        legend.get_title().set_fontsize(8.5)


def _cycle(colors: Sequence[str], count: int) -> list[str]:
    return [colors[i % len(colors)] for i in range(count)]

import io
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageColor
from rich.console import Console

from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import LearnerStart, LearnerStep
from agentjet.schemas.subject import Stream
from agentjet.ui.curve import LearningCurve, TerminalCurve, plain_name
from agentjet.ui.history import RunHistory
from agentjet.ui.plot import RATIO_COLORS, save_plot, smooth

RUN = RunId("run-abcdef")
CURVE = LearningCurve(
    rewards={"reward": [(1, 0.1), (2, 0.4), (3, 0.6)]},
    ratios={"win": [(1, 0.0), (2, 0.5), (3, 0.5)]},
    evals={"evaluation": [(0, 0.05), (3, 0.65)]},
    references={"perfect player": 1.0, "random valid player": 0.5},
)


class AsciiFile(io.StringIO):
    encoding = "ascii"


def lines_of(curve: LearningCurve, width: int, file: io.StringIO | None = None, height: int = 11) -> list[str]:
    console = Console(width=width, file=file or io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(TerminalCurve(curve, height=height))
    return capture.get().splitlines()


def history_of(*metrics: dict[str, float], model: str = "m", history: RunHistory | None = None) -> RunHistory:
    history = history or RunHistory()
    start = LearnerStart(run=RUN, model=model, incarnation=1, base_step=0, cursor=0, config_digest="c", fold_digest="f")
    history.apply(Stream.LEDGER, history.next_sequence(Stream.LEDGER), 0.0, start)
    for number, values in enumerate(metrics, 1):
        step = LearnerStep(
            run=RUN,
            model=model,
            incarnation=1,
            step=number,
            cursor=0,
            members=(),
            groups=(),
            digest="d",
            metrics=values,
        )
        history.apply(Stream.LEDGER, history.next_sequence(Stream.LEDGER), float(number), step)
    return history


@pytest.mark.parametrize("width", [10, 40, 80, 200])
def test_a_curve_fits_the_width(width: int):
    lines = lines_of(CURVE, width)
    assert max(map(len, lines)) <= width
    assert len(lines) >= 13


def test_a_curve_names_what_it_draws():
    text = "\n".join(lines_of(CURVE, 120))
    for part in ("─ reward 0.60", "─ win 0.50", "◆ evaluation 0.65", "┄ random valid player 0.50", "step 3", "1.00│"):
        assert part in text


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right():
    rows = [line.split("│", 1)[1] for line in lines_of(LearningCurve({"reward": [(0, 0.0), (10, 1.0)]}), 60)[:11]]
    columns = [next(i for i, sign in enumerate(row) if sign != " ") for row in rows]
    assert columns == sorted(columns, reverse=True)
    assert columns[-1] == 0 and columns[0] >= len(rows[0].rstrip()) - 8


def test_an_ascii_terminal_gets_ascii():
    lines = lines_of(CURVE, 60, AsciiFile())
    assert all(line.isascii() for line in lines)
    assert any("E" in line for line in lines)


def test_an_empty_curve_says_so():
    assert lines_of(LearningCurve(references={"perfect player": 1.0}), 80) == [
        "No step has been taken yet: there is no curve to draw."
    ]


def test_one_step_is_drawn():
    assert any(ord(sign) > 0x2800 for line in lines_of(LearningCurve({"reward": [(1, 0.5)]}), 40) for sign in line)


def test_rewards_beyond_one_widen_the_axis_and_leave_shares_to_the_picture():
    curve = LearningCurve(rewards={"reward": [(1, -5.0), (2, 20.0)]}, ratios={"win": [(1, 0.1)]})
    text = "\n".join(lines_of(curve, 60))
    assert "20.00│" in text and "-5.00│" in text and "win" not in text


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.floats(-1e9, 1e9)), max_size=20),
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(1, 120),
    st.integers(0, 20),
)
def test_drawing_never_crashes(points: list[tuple[float, float]], level: float, width: int, height: int):
    lines_of(LearningCurve({"reward": sorted(points)}, references={"level": level}), width, height=height)


def test_a_curve_of_a_history_leaves_out_what_is_not_finite():
    history = history_of(
        {"reward_mean": 0.1, "episode/win_ratio": 0.2, "episode/turns": 3.0, "episode/odd": 0.5},
        {"reward_mean": math.nan, "episode/win_ratio": 0.4, "episode/turns": 2.0, "episode/odd": 0.0},
    )
    curve = LearningCurve.of(history, {"perfect player": 1.0})
    assert curve.rewards == {"reward": [(1, 0.1)]}
    assert curve.ratios == {"odd": [(1, 0.5), (2, 0.0)], "win": [(1, 0.2), (2, 0.4)]}
    assert curve.evals == {}


def test_each_of_several_models_has_its_own_reward_line():
    history = history_of({"reward_mean": 0.2}, model="b", history=history_of({"reward_mean": 0.1}, model="a"))
    assert LearningCurve.of(history).rewards == {"reward a": [(1, 0.1)], "reward b": [(1, 0.2)]}


def test_plain_names_have_no_prefix_and_no_unit():
    assert plain_name("episode/valid_reply_ratio") == "valid reply"


def test_smoothing_keeps_steps_and_a_constant():
    points = [(float(step), 0.5) for step in range(9)]
    assert smooth(points) == points
    assert smooth([(1, 0.0), (2, 3.0)]) == [(1, 1.5), (2, 1.5)]
    assert smooth([]) == []


@pytest.mark.parametrize(
    "curve",
    [CURVE, LearningCurve(), LearningCurve({"reward": [(1, 0.5)]}), LearningCurve({"reward": [(1, -3), (2, 12)]})],
    ids=["full", "empty", "one step", "wide range"],
)
def test_the_picture_is_a_png_of_the_asked_size(curve: LearningCurve, tmp_path: Path):
    path = save_plot(
        curve, tmp_path / "deep" / "curve.png", title=r"guess $\oops$", subtitle=r"$\frac$", size_pixels=(640, 400)
    )
    with Image.open(path) as image:
        image.verify()
        assert (image.format, image.size) == ("PNG", (640, 400))


def test_every_part_of_a_curve_is_in_the_picture(tmp_path: Path):
    parts: list[dict[str, Any]] = [
        {},
        *({name: getattr(CURVE, name)} for name in ("rewards", "ratios", "evals", "references")),
    ]
    pictures = {save_plot(LearningCurve(**part), tmp_path / "curve.png", title="t").read_bytes() for part in parts}
    assert len(pictures) == 5


def test_shares_are_drawn_in_their_colors(tmp_path: Path):
    path = save_plot(LearningCurve(ratios=CURVE.ratios), tmp_path / "curve.png", title="t")
    with Image.open(path) as image:
        colors = {color for _, color in image.convert("RGB").getcolors(1 << 20) or []}
    assert ImageColor.getrgb(RATIO_COLORS[0]) in colors

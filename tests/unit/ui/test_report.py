import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentjet.schemas.episode import EndStatus, Episode
from agentjet.schemas.ids import GroupId, RunId
from agentjet.schemas.ledger import LearnerStart, LearnerStep
from agentjet.schemas.subject import Stream
from agentjet.schemas.task import Ticket
from agentjet.ui.curve import LearningCurve
from agentjet.ui.history import RunHistory
from agentjet.ui.report import Report, json_line, plain_text, print_report, summary, transcript

RUN = RunId("run-abcdef")


def episode(*messages: dict[str, Any], reward: float | None = None) -> Episode:
    ticket = Ticket(
        run=RUN,
        pool="eval",
        group=GroupId("eval-0"),
        member=0,
        group_size=1,
        models=("m",),
        seed=1,
        deadline_seconds=9.0,
    )
    return Episode(run=RUN, ticket=ticket, attempt=1, status=EndStatus.COMPLETED, reward=reward, transcript=messages)


BEFORE = episode({"role": "user", "content": "Guess."}, {"role": "assistant", "content": "I am [bold]Sam"}, reward=0.0)
AFTER = episode({"role": "user", "content": "Guess."}, {"role": "assistant", "content": "4"}, reward=1.0)


def report(**changes: Any) -> Report:
    values: dict[str, Any] = {
        "title": "guess learned",
        "curve": LearningCurve({"reward": [(1, 0.1), (2, 0.9)]}),
        "seconds": 332.4,
        "audit": {"settled": 1280, "lost": 0, "duplicated": 0, "offered_again": 3},
        "before": BEFORE,
        "after": AFTER,
        "checkpoints": {"m": "run/checkpoints/m/1-40"},
        "commands": {"Continue": "agentjet demo --steps 80"},
        "plot": Path("run/curve.png"),
    }
    return Report(**{**values, **changes})


def printed(value: Report, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        print_report(console, value)
    return capture.get()


def shown(value: Episode) -> str:
    console = Console(width=60, file=io.StringIO(), force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(transcript(value))
    return capture.get()


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_report_fits_the_width(width: int):
    lines = printed(report(), width).splitlines()
    to_copy = [line for line in lines if line.startswith(("Curve: ", "Checkpoint: ")) or "agentjet demo" in line]
    assert len(to_copy) == 3
    assert max(len(line) for line in lines if line not in to_copy) <= width


def test_a_report_tells_all_there_is():
    text = printed(report(), 120)
    for part in ("guess learned", "1280 settled, 0 lost, 0 counted twice", "3 offered again", "5:32", "run/curve.png"):
        assert part in text
    for part in ("run/checkpoints/m/1-40", "agentjet demo --steps 80", "Before training  reward 0.00", "[bold]Sam"):
        assert part in text


def test_transcripts_stand_side_by_side_where_there_is_room():
    wide, narrow = (printed(report(), width).splitlines() for width in (120, 80))
    assert any("Before" in line and "After" in line for line in wide)
    assert not any("Before" in line and "After" in line for line in narrow)


def test_a_report_of_a_run_without_a_step_is_short():
    text = printed(Report(title="nothing", curve=LearningCurve(), seconds=1.0, audit={}))
    assert "No step has been taken yet" in text and "0 settled" in text and "Before" not in text


def test_control_sequences_of_a_model_have_no_effect():
    text = shown(episode({"role": "assistant\x1b[31m", "content": "a\x1b[2Jb\ud800\nc"}))
    assert "\x1b" not in text and "a\N{REPLACEMENT CHARACTER}[2Jb" in text
    assert plain_text("1\n2\t3\x07") == "1\n2\N{REPLACEMENT CHARACTER}3\N{REPLACEMENT CHARACTER}"


def test_messages_of_any_shape_are_shown():
    text = shown(
        episode(
            {"role": "assistant", "content": None, "tool_calls": [{"name": "search"}]},
            {"note": 1},
            {"role": "tool", "content": ["a", {"b": 2}]},
            {"role": "user", "content": ""},
        )
    )
    for part in ("search", '{"note":1}', '["a",{"b":2}]', "(empty)"):
        assert part in text


def test_long_transcripts_are_cut():
    text = shown(episode(*({"role": "user", "content": "x" * 5_000} for _ in range(20))))
    assert "... and 6 more messages" in text
    assert text.count("x") == 14 * 600
    assert "logged no messages" in shown(episode())


def history_of(*rewards: float, model: str = "m", history: RunHistory | None = None) -> RunHistory:
    history = history or RunHistory()
    start = LearnerStart(run=RUN, model=model, incarnation=1, base_step=0, cursor=0, config_digest="c", fold_digest="f")
    history.apply(Stream.LEDGER, history.next_sequence(Stream.LEDGER), 0.0, start)
    for number, reward in enumerate(rewards, 1):
        step = LearnerStep(
            run=RUN,
            model=model,
            incarnation=1,
            step=number,
            cursor=0,
            members=(),
            groups=(),
            digest="d",
            metrics={"reward_mean": reward, "merge_token_ratio": 2.0 * number},
        )
        history.apply(Stream.LEDGER, history.next_sequence(Stream.LEDGER), float(number), step)
        history.apply(Stream.EPISODES, history.next_sequence(Stream.EPISODES), float(number), None)
    return history


def test_the_json_line_has_the_figures_of_the_run():
    history = history_of(0.1, math.nan, 0.7)
    line = json_line(summary(history, {"settled": 3, "lost": 0, "duplicated": 0}, 12.3456), seed=7, path=Path("a/b"))
    assert "\n" not in line
    assert json.loads(line) == {
        "steps": 3,
        "episodes": 3,
        "settled": 3,
        "lost": 0,
        "duplicated": 0,
        "reward_first": 0.1,
        "reward_last": 0.7,
        "merge_token_ratio": 4.0,
        "seconds": 12.346,
        "seed": 7,
        "path": "a/b",
    }


def test_the_json_line_of_an_empty_run_has_nulls():
    figures = json.loads(json_line(summary(RunHistory(), {}, 0.0), ratio=math.nan))
    assert (figures["steps"], figures["reward_first"], figures["merge_token_ratio"], figures["ratio"]) == (
        0, None, None, None,
    )  # fmt: skip


def test_two_models_are_summed_up_by_the_slower_and_by_the_mean():
    history = history_of(0.2, 0.4, model="b", history=history_of(0.6, model="a"))
    figures = summary(history, {}, 1.0)
    assert (figures["steps"], figures["reward_first"], figures["reward_last"]) == (1, 0.4, 0.5)

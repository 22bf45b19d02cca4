import io
import math
from typing import Any

import pytest
from made_issue import group_issue
from rich.console import Console

from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import LearnerStart, LearnerStep
from agentjet.schemas.presence import Presence, Waiting
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.subject import Stream
from agentjet.schemas.task import EpisodeKind, Ticket
from agentjet.ui.history import RunHistory
from agentjet.ui.progress import Progress, clock_text, seconds_left, sparkline

RUN = RunId("run-abcdef")
FIGURES = {
    "reward_mean": 0.25,
    "episode/valid_ratio": 0.5,
    "generation_tokens_per_second": 210.4,
    "tokens_per_second": 245.0,
    "merge_token_ratio": 2.5,
    "staleness_mean": 0.75,
    "step_seconds": 10.0,
}


def history_of(num_steps: int = 3, model: str = "m", **metrics: float) -> RunHistory:
    history = RunHistory()
    add_start(history, model)
    for number in range(1, num_steps + 1):
        add_step(history, number, model, {**FIGURES, **metrics})
    return history


def add_start(history: RunHistory, model: str) -> None:
    start = LearnerStart(run=RUN, model=model, incarnation=1, base_step=0, cursor=0, config_digest="c", fold_digest="f")
    history.apply(Stream.LEDGER, history.next_sequence(Stream.LEDGER), 1000.0, start)


def add_step(history: RunHistory, number: int, model: str, metrics: dict[str, float], **more: Any) -> None:
    step = LearnerStep(
        run=RUN,
        model=model,
        incarnation=1,
        step=number,
        cursor=0,
        members=("a-0.0",),
        groups=(),
        digest="d",
        metrics=metrics,
        **more,
    )
    history.apply(Stream.LEDGER, history.next_sequence(Stream.LEDGER), 1000.0 + 10 * number, step)


def add_evaluation(history: RunHistory, reward: float | None) -> None:
    ticket = Ticket(
        run=RUN,
        pool="eval",
        group="eval-0",
        member=0,
        group_size=1,
        max_offers=1,
        kind=EpisodeKind.EVAL,
        models=("m",),
        seed=1,
        deadline_seconds=9.0,
    )
    group = group_issue(RUN, pool="eval", kind=EpisodeKind.EVAL, size=1, deadline_seconds=9.0, eval_step=0)
    outcome = Outcome.DEAD if reward is None else Outcome.SCORED
    metrics = {} if reward is None else {"win_ratio": 0.5}
    score = Score(run=RUN, ticket=ticket, attempt=1, outcome=outcome, reward=reward, metrics=metrics)
    history.apply(Stream.LEDGER, history.next_sequence(Stream.LEDGER), 1.0, group)
    history.apply(Stream.SCORES, 1, 1.0, score)


def failed_score() -> Score:
    ticket = Ticket(
        run=RUN,
        pool="p",
        group="p-0",
        member=0,
        group_size=1,
        models=("m",),
        seed=1,
        deadline_seconds=9.0,
        max_offers=1,
    )
    return Score(run=RUN, ticket=ticket, attempt=1, outcome=Outcome.INVALID)


def presence(actor: str, *waits: str, **more: Any) -> Presence:
    waiting = tuple(Waiting(what=what, since=1000.0) for what in waits)
    state = "waiting" if waits else "busy"
    return Presence(
        run=RUN, actor=actor, name=actor, host="h", pid=1, started=1.0, state=state, waiting=waiting, **more
    )


def console_of(width: int, *, is_terminal: bool = False, file: io.StringIO | None = None) -> Console:
    return Console(
        width=width, height=30, file=file or io.StringIO(), force_terminal=is_terminal, color_system=None, _environ={}
    )


def panel(history: RunHistory, width: int = 80, actors: tuple[Presence, ...] = (), num_steps: int = 40) -> str:
    console = console_of(width)
    progress = Progress(console, history, num_steps=num_steps, title="guess", clock=lambda: 1042.0)
    progress._presence = actors
    with console.capture() as capture:
        console.print(progress.render())
    return capture.get()


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [12, 40, 80, 200])
@pytest.mark.parametrize("num_steps", [0, 1, 30])
def test_the_panel_fits_the_width(width: int, num_steps: int):
    text = panel(history_of(num_steps), width, (presence("learner", "a very long thing to wait for " * 5),))
    assert max(map(len, text.splitlines())) <= width
    if width > 40:
        assert f"step {num_steps}/40" in text


def test_the_panel_shows_the_figures_of_the_run():
    text = panel(history_of(3))
    for part in ("step 3/40", "ETA 6:00", "reward     0.250  valid 50%", "generation 210 tok/s", "training 245 tok/s"):
        assert part in text
    for part in ("merge 2.50x", "staleness 0.8", "3 trained"):
        assert part in text


def test_the_panel_of_a_run_without_a_step_says_so():
    assert "no step yet" in panel(RunHistory())


def test_the_panel_says_what_each_kind_of_actor_waits_for():
    text = panel(RunHistory(), 100, (presence("rollout"), presence("rollout"), presence("learner", "32 episodes")))
    assert "rollout x2 busy" in text
    assert "learner    waits 42 s for 32 episodes" in text


def test_failures_are_counted_by_name_and_what_needs_a_person_is_shown_whole():
    history, sentence = RunHistory(), f"the last 40 episodes of pool sums failed: {'boom ' * 20}; see logs/rollout.log"
    add_evaluation(history, 0.75)
    assert "1 issued, 0 ended, 1 scored, 0 trained" in panel(history)
    history.apply(Stream.SCORES, 2, 1.0, failed_score())
    text = panel(history, 80, (presence("curriculum", problems=(sentence,)), presence("rollout", problems=(sentence,))))
    assert "1 scored, 1 failed, 0 trained" in text
    assert text.count("! the last 40 episodes") == 1
    assert "see logs/rollout.log" in " ".join(text.replace("│", " ").split())


def test_a_problem_is_one_plain_line_now_and_then():
    times, console = [0.0], console_of(40)
    progress = Progress(console, RunHistory(), num_steps=4, title="x", clock=lambda: times[-1])
    for time, sentence in ((1.0, "8 failed"), (2.0, "9 failed"), (32.0, "40 failed"), (33.0, ""), (34.0, "8 failed")):
        times.append(time)
        progress.refresh([presence("curriculum", problems=(sentence,) if sentence else ())])
    assert written(console) == "! 8 failed\n! 40 failed\n! 8 failed\n"


def test_generation_speed_comes_from_the_engines_where_no_step_says_it():
    engine = presence("inference", models=("m",), metrics={"tokens_per_second": 123.0})
    assert "generation 123 tok/s" in panel(history_of(1, generation_tokens_per_second=math.nan), 100, (engine,))


def test_metrics_that_are_not_finite_are_left_out():
    text = panel(history_of(3, reward_mean=math.nan, merge_token_ratio=math.inf))
    assert "nan" not in text and "inf" not in text and "merge" not in text


def test_the_panel_shows_an_evaluation():
    history = history_of(1)
    add_evaluation(history, 0.75)
    assert "at step 0:  reward 0.750  win 50%" in panel(history)


def test_an_evaluation_of_which_nothing_was_scored_says_so():
    history = history_of(1)
    add_evaluation(history, None)
    assert "at step 0:  no episode was scored" in panel(history)


def test_without_a_terminal_each_step_is_one_plain_line_and_printed_once():
    console, history = console_of(40), history_of(2)
    add_evaluation(history, 0.75)
    with Progress(console, history, num_steps=40, title="guess") as progress:
        progress.refresh()
        add_step(history, 3, "m", FIGURES)
    lines = written(console).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["evaluation at step 0:", "step 1/40", "step 2/40", "step 3/40"]
    assert lines[-1] == (
        "step 3/40  reward 0.250  valid 50%  generation 210 tok/s  training 245 tok/s  merge 2.50x  staleness 0.8"
        "  step 10.0 s  ETA 6:10"
    )
    assert "\x1b" not in written(console)


def test_a_skipped_step_and_nan_are_said_plainly():
    console, history = console_of(80), history_of(0)
    add_step(history, 1, "m", {"reward_mean": math.nan}, is_skipped=True)
    with Progress(console, history, num_steps=0, title="guess"):
        pass
    assert written(console) == "step 1  skipped: the gradient was not finite\n"


def test_lines_name_the_model_where_there_are_several():
    console, history = console_of(80), history_of(1, model="a")
    add_start(history, "b")
    add_step(history, 1, "b", {})
    with Progress(console, history, num_steps=4, title="two"):
        pass
    assert [line.split("  ")[:2] for line in written(console).splitlines()] == [["a:", "step 1/4"], ["b:", "step 1/4"]]


def test_a_terminal_that_shrinks_is_cleared_and_drawn_again():
    console, history = console_of(100, is_terminal=True), history_of(2)
    with Progress(console, history, num_steps=40, title="guess") as progress:
        progress.refresh([presence("learner")])
        before = len(written(console))
        console.width = 30
        progress.refresh()
        drawn = written(console)[before:]
    assert "\x1b[2J" in drawn and "step 2/40" in drawn
    assert written(console).count("\x1b[?25h") == 1, "the cursor is shown again"


class BrokenFile(io.StringIO):
    error: BaseException | None = None

    def write(self, text: str, /) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_that_goes_away_does_not_stop_the_run(is_terminal: bool):
    file = BrokenFile()
    history = history_of(1)
    with Progress(console_of(80, is_terminal=is_terminal, file=file), history, num_steps=4, title="x") as progress:
        progress.refresh()
        file.error = OSError("gone")
        add_step(history, 2, "m", FIGURES)
        progress.refresh()
        progress.refresh()


def test_time_to_go_follows_the_last_steps_and_survives_odd_clocks():
    model = history_of(3).models["m"]
    assert seconds_left(model, 10, 1030.0) == pytest.approx(70.0)
    assert seconds_left(model, 10, 1e12) == pytest.approx(60.0)
    assert seconds_left(model, 10, 0.0) == pytest.approx(70.0)
    assert seconds_left(model, 3, 1031.0) == 0.0
    assert seconds_left(model, 0, 1030.0) is None
    assert seconds_left(history_of(0).models["m"], 10, 1030.0) is None
    assert seconds_left(history_of(1).models["m"], 10, 1010.0) == pytest.approx(90.0)


def test_times_and_sparklines_read_well():
    assert [clock_text(seconds) for seconds in (0, 59.6, 3725)] == ["0:00", "1:00", "1:02:05"]
    assert sparkline([0, 1, 2, 3], 3) == "▁▅█"
    assert sparkline([1, 1], 8) == "▁▁"
    assert sparkline([], 8) == ""
    assert sparkline([0, 1], 8, is_ascii=True) == "_@"

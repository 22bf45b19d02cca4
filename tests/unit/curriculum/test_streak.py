"""Failures in a row: who is told, when nothing more is issued, and what sets it going again."""

import pytest

from agentjet.config.settings import PoolSettings, SwarmSettings
from agentjet.curriculum.code import CodeWatch
from agentjet.curriculum.course import Course
from agentjet.curriculum.dataset import load_orders
from agentjet.curriculum.streak import MIN_STOP, PROBE_SECONDS, Streaks, streaks_of
from agentjet.schemas.episode import Fault
from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import CurriculumStart, DropReason, GroupDrop, LearnerStart
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.task import EpisodeKind, Ticket

RUN = RunId("run-abc")
BOOM = Fault(kind="ValueError", message="boom (agent.py:3)")


def settings_of(workflow="agent.py:run", *, pools=("sums",), batch_groups=1, group_size=2) -> SwarmSettings:
    pool = {"workflow": workflow, "tasks": "t", "group_size": group_size, "max_offers": 1}
    model = {"path": "tiny", "learner": {"batch_groups": batch_groups, "admission_bound": 99}}
    return SwarmSettings.model_validate({"models": {"m": model}, "pools": {name: dict(pool) for name in pools}})


def score(outcome=Outcome.INVALID, *, pool="sums", ticket: Ticket | None = None, **changes) -> Score:
    kind = changes.pop("kind", EpisodeKind.TRAIN)
    ticket = ticket or Ticket(
        run=RUN, pool=pool, group=f"{pool}-0", member=0, group_size=2, kind=kind, models=("m",), seed=0,
        deadline_seconds=1.0,
    )  # fmt: skip
    reward = 0.0 if outcome is Outcome.SCORED else None
    return Score(run=RUN, ticket=ticket, attempt=1, outcome=outcome, reward=reward, **({"fault": BOOM} | changes))


def failing(count: int, streaks: Streaks, **changes) -> Streaks:
    for _ in range(count):
        streaks.score(score(**changes), 0.0)
    return streaks


def test_from_eight_failures_on_a_person_is_told_which_pool_why_and_where_to_look():
    streaks = failing(7, streaks_of(settings_of()))
    assert streaks.problems() == []
    failing(13, streaks)
    sentence = "the last 20 episodes of pool sums failed: ValueError: boom (agent.py:3); see logs/rollout.log"
    assert streaks.problems() == [sentence]
    failing(20, streaks)
    assert streaks.problems() == [f"{sentence.replace('20', '40')}; admission has stopped"]


def test_any_reward_ends_a_streak():
    streaks = failing(100, streaks_of(settings_of()))
    streaks.score(score(Outcome.SCORED, fault=None), 0.0)
    assert (streaks.problems(), list(streaks.stops())) == ([], [])


@pytest.mark.parametrize(("batch_groups", "group_size", "limit"), [(1, 2, MIN_STOP), (4, 8, 96)])
def test_admission_stops_after_three_batches_of_failures_in_a_row(batch_groups, group_size, limit):
    streaks = failing(limit - 1, streaks_of(settings_of(batch_groups=batch_groups, group_size=group_size)))
    assert not streaks.is_stopping("sums")
    failing(1, streaks, kind=EpisodeKind.EVAL)
    assert not streaks.is_stopping("sums"), "evaluations have no part in admission"
    failing(1, streaks)
    assert streaks.is_stopping("sums")
    assert list(streaks.stops()) == [
        (
            "sums",
            f"admission stopped: {limit + 1} episodes in a row failed with ValueError: boom (agent.py:3); "
            "fix the agent: a changed file is picked up",
            "the author of the agent",
        )
    ]


@pytest.mark.parametrize(
    ("workflow", "judged_by", "is_judged", "culprit", "log"),
    [
        ("agent.py:run", "client", False, "the agent", "logs/rollout.log"),
        ("agent.py:run", "judge.py:score", False, "the reward function", "logs/reward.log"),
        ("agent.py:run", "judge.py:rank", True, "the group judge", "logs/reward.log"),
        ("", "", False, "the client", "the output of its clients"),
    ],
)
def test_the_one_at_fault_is_named(workflow, judged_by, is_judged, culprit, log):
    ticket = score().ticket.model_copy(update={"is_judged": is_judged})
    streaks = streaks_of(settings_of(workflow, pools=("sums", "other")))
    failing(40, streaks, ticket=ticket, judged_by=judged_by)
    ((_, sentence, by),) = streaks.stops()
    assert "admission of pool sums stopped" in sentence and f"fix {culprit}:" in sentence
    assert (by, f"see {log};" in streaks.problems()[0]) == (f"the author of {culprit}", True)


def test_a_group_judge_that_is_a_file_is_watched_as_well(tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text("def rank(task, episodes): return []\n")
    of = settings_of("games.agent:run").pools["sums"].model_copy(update={"group_judge": f"{judge}:rank"})
    assert streaks_of(SwarmSettings.model_construct(pools={"sums": of}, models={})).watched == {"sums"}
    watch = CodeWatch({"sums": of})
    judge.write_text("def rank(task, episodes): return [1.0]\n")
    assert watch.changed() == ["sums"]


@pytest.mark.parametrize(("workflow", "is_watched"), [("agent.py:run", True), ("games.agent:run", False)])
def test_only_of_a_file_it_is_said_that_a_change_is_picked_up(workflow, is_watched):
    streaks = failing(40, streaks_of(settings_of(workflow)))
    ((_, sentence, _),) = streaks.stops()
    assert ("a changed file is picked up" in sentence) == is_watched


class World:
    """A course whose episodes all fail until told otherwise."""

    def __init__(self) -> None:
        settings = settings_of()
        self.course = Course(RUN, settings, load_orders(settings, lambda _: [{"n": 1}]))
        self.sequence, self.now = 0, 1000.0
        self.write(CurriculumStart(run=RUN, incarnation=1, config_digest="c"))
        fields = {"base_step": 0, "cursor": 0, "config_digest": "c", "fold_digest": "f"}
        self.write(LearnerStart(run=RUN, model="m", incarnation=1, **fields))

    def write(self, record) -> None:
        self.sequence += 1
        self.course.apply(self.sequence, self.now, record)

    def play_all(self, outcome=Outcome.INVALID) -> int:
        """Issue, end and drop groups until nothing more is issued; how many there were."""
        count = 0
        while count < 50 and (issue := self.course.next_training(self.now)) is not None:
            self.write(issue)
            count += 1
            for out, member, _ in list(self.course.board.open_slots()):
                one = score(outcome, ticket=self.course.board.ticket(out, member).without_task())
                self.course.scored(one, self.now)
            if outcome is not Outcome.SCORED:
                rank = issue.ranks["m"]
                self.write(
                    GroupDrop(
                        run=RUN,
                        model="m",
                        incarnation=1,
                        group=f"sums-{issue.index}",
                        rank=rank,
                        reason=DropReason.TOO_FEW,
                    )
                )
        return count


def test_a_group_is_let_through_now_and_then_and_one_when_the_code_has_changed():
    world = World()
    assert world.play_all() == MIN_STOP / 2
    world.now += PROBE_SECONDS - 1
    assert world.play_all() == 0
    world.now += 1
    assert world.play_all() == 1
    world.course.streaks.changed("sums")
    assert world.play_all() == 1
    world.course.streaks.changed("sums")
    assert world.play_all(Outcome.SCORED) > 1, "a success sets it going"


def test_no_second_probe_goes_out_before_the_first_has_ended():
    world = World()
    world.play_all()
    for _ in range(2):
        world.now += PROBE_SECONDS
        issue = world.course.next_training(world.now)
        if issue is not None:
            world.write(issue)
    assert issue is None


def test_code_that_changes_is_noticed_once_and_what_is_elsewhere_is_left_alone(tmp_path):
    agent = tmp_path / "agent.py"
    agent.write_text("def run(task, policy): ...\n")
    pools = {"here": f"{agent}:run", "away": f"{tmp_path}/absent.py:run", "module": "absent_package.agent:run"}
    watch = CodeWatch({pool: PoolSettings(workflow=workflow) for pool, workflow in pools.items()})
    assert watch.changed() == []
    agent.write_text("def run(task, policy): return 1.0\n")
    assert (watch.changed(), watch.changed()) == (["here"], [])
    agent.unlink()
    assert watch.changed() == ["here"]

"""Whole runs without a bus: the course decides, dice play, folds learn, everybody may restart."""

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_issue import group_issue

from agentjet.accounting.audit import Audit
from agentjet.accounting.fold import LearnerFold
from agentjet.config.settings import SwarmSettings
from agentjet.curriculum.course import Course
from agentjet.curriculum.dataset import load_orders
from agentjet.errors import FencedError
from agentjet.schemas.claim import OfferRequest
from agentjet.schemas.ids import RunId, TicketName
from agentjet.schemas.ledger import CurriculumStart, GroupDrop, GroupIssue, LearnerStart, LearnerStep, RunFinish
from agentjet.schemas.sample import MergeReport, Sample, Tombstone, TombstoneReason
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.task import EpisodeKind

RUN = RunId("run-abc")
EMPTY = {"segments": (), "calls": (), "term_segment": (), "term_offset": (), "term_logprob": ()}
REPORT = MergeReport(num_calls=0, num_branches=0, num_row_tokens=0, num_tree_tokens=0)


def swarm_settings(*, models=None, pools=None, **sections):
    models = models or {"m": {}}
    algorithm = {"min_group": 1}
    table = {name: {"path": "tiny", "learner": learner, "algorithm": algorithm} for name, learner in models.items()}
    pools = pools or {"p": {"tasks": "tasks", "group_size": 2}}
    return SwarmSettings.model_validate({"models": table, "pools": pools} | sections)


def course_of(config):
    return Course(RUN, config, load_orders(config, lambda _: [{"n": number} for number in range(3)]))


class World:
    """A run in memory. `samples` is the SAMPLES log of each model."""

    def __init__(self, config, dice):
        self.config, self.dice = config, dice
        self.ledger, self.scores, self.samples = [], [], {model: [] for model in config.models}
        self.folds, self.incarnations = {}, dict.fromkeys(config.models, 0)
        self.checkpoints, self.read = {}, dict.fromkeys(config.models, 0)
        self.course = course_of(config)
        self.restart()

    def write(self, record):
        self.ledger.append(record)
        self.course.apply(len(self.ledger), float(len(self.ledger)), record)

    def restart(self):
        """A new curriculum reads everything that is stored."""
        before = self.course
        self.course = course_of(self.config)
        for sequence, record in enumerate(self.ledger, 1):
            self.course.apply(sequence, float(sequence), record)
        for time, score in enumerate(self.scores):
            self.course.scored(score, float(time))
        assert list(self.course.board.groups) == list(before.board.groups)
        # What was published again and not played is forgotten; publishing it twice changes nothing.
        assert before.board.paused.items() <= self.course.board.paused.items()
        assert list(self.course.board.open_slots()) == list(before.board.open_slots())
        self.course.incarnation = self.course.ledger.incarnation + 1
        self.write(CurriculumStart(run=RUN, incarnation=self.course.incarnation, config_digest="c"))

    def issue(self):
        record = self.course.next_evaluation_group() or self.course.next_training(0.0)
        if record is not None:
            self.write(record)
        return record

    def play(self):
        """One open ticket gets its outcome; a closed training slot its record for each model."""
        self.course.reoffers.take(self.dice.random() * len(self.scores))
        slots = [slot for slot in self.course.board.open_slots() if slot[2] not in self.course.board.paused]
        if not slots:
            return bool(self.course.reoffers.take(1e9))
        out, member, text = self.dice.choice(slots)
        ticket = self.course.board.ticket(out, member)
        assert ticket.id == text
        weights = {Outcome.SCORED: 8, Outcome.INVALID: 2, Outcome.ABORTED: 1, Outcome.DEAD: 1}
        outcome = self.dice.choices(list(weights), list(weights.values()))[0]
        reward = float(self.dice.random() < 0.5) if outcome is Outcome.SCORED else None
        score = Score(run=RUN, ticket=ticket.without_task(), attempt=1, outcome=outcome, reward=reward)
        self.scores.append(score)
        self.course.scored(score, float(len(self.scores) - 1))
        again = TicketName(ticket.group, ticket.member, ticket.offer + 1).id
        assert self.course.board.is_current(again) != score.closes_slot
        if score.closes_slot:
            for model, rank in ticket.ranks.items():
                self.samples[model].append(self.slot_record(model, rank, score))
        return True

    def slot_record(self, model, rank, score):
        ticket = score.ticket
        common = {"run": RUN, "model": model, "ticket": ticket.id, "group": ticket.group, "member": ticket.member}
        common |= {"rank": rank, "group_size": ticket.group_size}
        if score.reward is None:
            return Tombstone(**common, reason=TombstoneReason.DEAD)
        if self.dice.random() < 0.1:
            return Tombstone(**common, reason=TombstoneReason.UNUSED)
        return Sample(**common, reward=score.reward, report=REPORT, **EMPTY)

    def start_learner(self, model):
        """From the newest checkpoint, or from the initial weights."""
        self.incarnations[model] += 1
        base, state = self.checkpoints.get(model, (0, None))
        one = self.config.models[model]
        options = {
            "batch_groups": one.learner.batch_groups,
            "straggler_bound": one.learner.straggler_bound,
            "min_group": one.algorithm.min_group,
        }
        fold = LearnerFold(**options) if state is None else LearnerFold.from_dict(state, **options)
        self.folds[model], self.read[model] = fold, fold.position
        self.write(
            LearnerStart(
                run=RUN,
                model=model,
                incarnation=self.incarnations[model],
                base_step=base,
                cursor=fold.cursor,
                config_digest="c",
                fold_digest=fold.digest(),
            )
        )

    def learn(self, model):
        fold, log = self.folds.get(model), self.samples[model]
        if fold is None:
            return False
        if self.read[model] < len(log):
            self.read[model] += 1
            fold.apply(self.read[model], log[self.read[model] - 1])
        common = {"run": RUN, "model": model, "incarnation": self.incarnations[model]}
        for drop in fold.pop_drops():
            self.write(GroupDrop(**common, group=drop.group, rank=drop.rank, reason=drop.reason))
        batch = fold.pop_batch()
        if batch is None:
            return self.read[model] < len(log)
        self.write(
            LearnerStep(
                **common,
                step=batch.step,
                cursor=batch.cursor,
                members=tuple(member.slot for member in batch.members),
                groups=tuple(group.group for group in batch.groups),
                digest="d",
            )
        )
        if self.dice.random() < 0.3:
            self.checkpoints[model] = (batch.step, copy.deepcopy(fold.to_dict()))
        return True

    def run(self, *, crash_ratio=0.0, max_turns=4000):
        """Until the course says that the run is over; returns why."""
        for model in self.config.models:
            self.start_learner(model)
        for _ in range(max_turns):
            if self.dice.random() < crash_ratio:
                self.dice.choice(
                    [self.restart, lambda: self.start_learner(self.dice.choice(list(self.config.models)))]
                )()
            steps = [lambda: self.issue() is not None, self.play]
            steps += [lambda model=model: self.learn(model) for model in self.config.models]
            self.dice.shuffle(steps)
            if not [step for step in steps if step()] and (reason := self.course.finish_reason()):
                self.write(RunFinish(run=RUN, reason=reason))
                return reason
        pytest.fail("the run hangs")

    def report(self):
        audit = Audit()
        for sequence, record in enumerate(self.ledger, 1):
            audit.ledger(sequence, float(sequence), record)
        for score in self.scores:
            audit.end(score.ticket.id, 0.0)
            audit.score(score, 0.0)
        for model, log in self.samples.items():
            for record in log:
                audit.sample(model, record.slot, 0.0, is_sample=isinstance(record, Sample))
        return audit.report(0.0)

    @property
    def issues(self):
        return [record for record in self.ledger if isinstance(record, GroupIssue)]


LEARNERS = st.fixed_dictionaries(
    {"batch_groups": st.integers(1, 3), "admission_bound": st.integers(0, 2), "straggler_bound": st.integers(0, 2)}
)


@settings(max_examples=40)
@given(LEARNERS, st.integers(1, 4), st.integers(0, 10**6), st.booleans())
def test_a_run_with_a_number_of_steps_ends_with_everything_counted_once(learner, num_steps, seed, has_eval):
    evaluation = {"pool": "p", "every_steps": 2, "num_tasks": 2} if has_eval else {}
    config = swarm_settings(models={"m": learner}, run={"num_steps": num_steps}, eval=evaluation)
    world = World(config, random.Random(seed))
    world.run()
    report = world.report()
    assert world.course.learners["m"].num_steps == num_steps
    assert (report.lost, report.duplicated) == (0, 0)
    assert report.settled == sum(issue.size for issue in world.issues)
    assert report.issued_not_ended.count == report.scored_not_sampled.count == report.sampled_not_settled.count == 0
    steps = [issue.eval_step for issue in world.issues if issue.kind is EpisodeKind.EVAL]
    wanted = sorted({0, *range(0, num_steps + 1, 2), num_steps}) if has_eval else []
    assert steps == [step for step in wanted for _ in range(2)]
    pins = [issue.pins["m"] for issue in world.issues if issue.kind is EpisodeKind.EVAL]
    assert pins == [f"1-{step}" for step in steps]


@settings(max_examples=40)
@given(LEARNERS, st.integers(0, 10**6), st.booleans())
def test_crashes_of_learner_and_curriculum_lose_nothing_and_count_nothing_twice(learner, seed, has_eval):
    evaluation = {"pool": "p", "every_steps": 1, "num_tasks": 1} if has_eval else {}
    config = swarm_settings(models={"m": learner}, run={"num_steps": 4}, eval=evaluation)
    world = World(config, random.Random(seed))
    world.run(crash_ratio=0.05)
    report = world.report()
    assert world.course.learners["m"].num_steps == 4
    assert (report.lost, report.duplicated) == (0, 0)
    assert report.scored_not_sampled.count == report.sampled_not_settled.count == 0


@settings(max_examples=25)
@given(LEARNERS, LEARNERS, st.integers(0, 10**6))
def test_two_models_of_one_episode_end_together_whatever_their_batches(one, two, seed):
    evaluation = {"pool": "p", "every_steps": 2, "num_tasks": 1}
    config = swarm_settings(models={"a": one, "b": two}, run={"num_steps": 3}, eval=evaluation)
    world = World(config, random.Random(seed))
    world.run(crash_ratio=0.02)
    report = world.report()
    assert (report.lost, report.duplicated) == (0, 0)
    assert 3 in (world.course.learners["a"].num_steps, world.course.learners["b"].num_steps)


@settings(max_examples=25)
@given(LEARNERS, st.integers(0, 10**6))
def test_a_finite_data_set_ends_the_run_after_a_last_evaluation(learner, seed):
    pools = {"p": {"tasks": "tasks", "group_size": 2, "num_epochs": 3}}
    config = swarm_settings(models={"m": learner}, pools=pools, eval={"pool": "p", "num_tasks": 1})
    world = World(config, random.Random(seed))
    assert "run out of tasks" in world.run()
    trained = [issue.position for issue in world.issues if issue.kind is EpisodeKind.TRAIN]
    assert trained == list(range(9))
    view = world.course.learners["m"]
    assert 9 - view.num_dropped - view.num_groups < learner["batch_groups"]
    assert world.issues[-1].eval_step in (-1, view.num_steps) or view.num_steps == 0
    world.folds["m"].finish(9)
    left = world.folds["m"].pop_batch()
    assert view.num_groups + view.num_dropped + (len(left.groups) if left else 0) == 9


def test_a_data_set_that_ends_before_the_last_step_is_named_as_the_reason():
    pools = {"p": {"tasks": "tasks", "group_size": 2, "num_epochs": 1}}
    config = swarm_settings(models={"m": {"batch_groups": 1}}, pools=pools, run={"num_steps": 100})
    assert World(config, random.Random(0)).run() == "every pool has run out of tasks"


def test_two_pools_are_issued_by_weight():
    pools = {"a": {"tasks": "t", "group_size": 1, "weight": 3}, "b": {"tasks": "t", "group_size": 1}}
    pools["held_out"] = {"tasks": "t", "weight": 0}
    config = swarm_settings(models={"m": {"batch_groups": 40}}, pools=pools)
    world = World(config, random.Random(0))
    while world.issue():
        pass
    issued = [issue.pool for issue in world.issues]
    assert (issued.count("a"), issued.count("b"), issued.count("held_out")) == (30, 10, 0)


def test_a_pool_may_be_kept_for_evaluation_only():
    pools = {"p": {"tasks": "t", "group_size": 1}, "held_out": {"tasks": "t", "weight": 0}}
    evaluation = {"pool": "held_out", "num_tasks": 2, "num_repeats": 3}
    config = swarm_settings(models={"m": {"batch_groups": 2}}, pools=pools, eval=evaluation, run={"num_steps": 1})
    world = World(config, random.Random(0))
    world.run()
    evaluated = [issue for issue in world.issues if issue.pool == "held_out"]
    assert [(issue.kind, issue.size, issue.eval_step) for issue in evaluated] == [
        (EpisodeKind.EVAL, 3, step) for step in (0, 0, 1, 1)
    ]


def offer(group):
    return OfferRequest(run=RUN, pool="own", group=group, task={}, size=1, worker="c")


def test_room_is_kept_for_a_client_that_was_refused_until_it_asks_again_or_goes_away():
    pools = {"p": {"tasks": "t", "group_size": 1}, "own": {}}
    config = swarm_settings(models={"m": {"batch_groups": 2}}, pools=pools)
    world = World(config, random.Random(0))
    while world.issue():
        pass
    course = world.course
    assert course.offered(offer("g"), 0.0) is None
    world.start_learner("m")
    groups = tuple(f"p-{issue.index}" for issue in world.issues)
    world.write(LearnerStep(run=RUN, model="m", incarnation=1, step=1, cursor=1, members=(), groups=groups, digest="d"))
    assert (course.room("p"), course.next_training(5.0)) == (2, None), "it is the client's turn"
    assert course.next_training(50.0) is not None, "the client went away"
    issue = course.offered(offer("g"), 50.0)
    assert issue is not None
    world.write(issue)
    assert course.client_issue("own", "g") == len(world.ledger)
    other = course.next_training(50.0)
    assert other is not None
    world.write(other)
    assert course.offered(offer("g2"), 50.0) is None


def test_no_evaluation_is_issued_while_a_learner_can_take_another_step():
    config = swarm_settings(models={"m": {"batch_groups": 1}}, eval={"pool": "p", "every_steps": 1, "num_tasks": 1})
    world = World(config, random.Random(0))
    world.start_learner("m")
    while world.course.learners["m"].num_steps < 2:
        while world.issue():
            pass
        world.play()
        world.learn("m")
    world.checkpoints.clear()
    world.start_learner("m")
    while world.learn("m") and world.course.learners["m"].num_steps == 0:
        pass
    assert world.course.learners["m"].num_steps == 1
    assert world.course.load("m").num_out > 0
    assert (world.course.evaluation_due(), world.issue()) == (None, None)


def test_an_evaluation_goes_on_under_its_pins_when_the_learner_starts_again_from_the_same_step():
    config = swarm_settings(models={"m": {"batch_groups": 1}}, eval={"pool": "p", "every_steps": 1, "num_tasks": 3})
    world = World(config, random.Random(0))
    world.start_learner("m")
    first = world.issue()
    world.start_learner("m")
    rest = [world.issue(), world.issue()]
    assert world.issue() is None
    assert [issue.position for issue in (first, *rest)] == [0, 1, 2]
    assert {str(issue.pins) for issue in (first, *rest)} == {"{'m': '1-0'}"}
    assert world.course.why_hopeless(first) is None
    world.restart()
    assert (world.issue(), world.course.evaluation_due()) == (None, 0)


def test_an_evaluation_of_lost_steps_is_hopeless_and_issued_anew():
    config = swarm_settings(models={"m": {"batch_groups": 1}}, eval={"pool": "p", "every_steps": 1, "num_tasks": 1})
    world = World(config, random.Random(0))

    def reach_evaluation():
        while not (world.course.learners["m"].num_steps and world.course.evaluation_due() == 1):
            while world.issue():
                pass
            world.play()
            world.learn("m")
            world.checkpoints.clear()
        issued = world.issue()
        assert issued is not None and issued.eval_step == 1
        return issued

    world.start_learner("m")
    lost = reach_evaluation()
    assert world.course.why_hopeless(lost) is None
    world.start_learner("m")
    assert (
        world.course.why_hopeless(lost)
        == "the weights that it was to evaluate are gone with steps that the learner lost"
    )
    again = reach_evaluation()
    assert (lost.pins, again.pins) == ({"m": "1-1"}, {"m": "2-1"})
    assert world.course.why_hopeless(again) is None


def test_a_group_of_a_pool_that_is_gone_is_hopeless():
    course = course_of(swarm_settings())
    assert course.why_hopeless(group_issue(RUN, pool="p")) is None
    assert course.why_hopeless(group_issue(RUN, pool="gone")) == "its pool gone is no longer configured"


def test_a_model_that_is_not_evaluated_trains_on_without_cutting_the_evaluation_of_another_short():
    pools = {name: {"tasks": "t", "group_size": 1, "models": [name]} for name in ("a", "b")}
    models = {"a": {"batch_groups": 1}, "b": {"batch_groups": 1}}
    evaluation = {"pool": "a", "every_steps": 1, "num_tasks": 2}
    world = World(swarm_settings(models=models, pools=pools, eval=evaluation), random.Random(0))
    world.start_learner("a")
    world.start_learner("b")
    while world.issue():
        pass
    assert [(issue.kind.value, issue.pool) for issue in world.issues][:3] == [("eval", "a")] * 2 + [("train", "b")]
    world.restart()
    assert world.course.evaluation.open_episodes(0) == (2, 2)
    assert (world.course.evaluation_due(), world.course.room("a")) == (0, 0)
    assert all(world.course.board.find(f"a-{index}.0.0") != "ended" for index in (0, 1))


def test_a_model_that_trains_on_passes_its_own_evaluation_whatever_else_is_out():
    board = course_of(swarm_settings(models={"one": {}, "two": {}})).board
    common = {"run": RUN, "size": 2, "deadline_seconds": 60.0, "max_offers": 1, "seed": 1, "position": 0}

    def issue(index, model, kind):
        ranks = {model: index} if kind is EpisodeKind.TRAIN else {}
        fields = {"pool": "p", "index": index, "models": (model,), "ranks": ranks, "kind": kind}
        board.issue(GroupIssue.model_validate(common | fields), float(index))

    for index, (model, kind) in enumerate(
        [("one", "train"), ("one", "eval"), ("two", "eval"), ("two", "train"), ("one", "train")]
    ):
        issue(index, model, EpisodeKind(kind))
        assert (
            list(board.groups)
            == {
                0: ["p-0"],
                1: ["p-0", "p-1"],
                2: ["p-0", "p-1", "p-2"],
                3: ["p-0", "p-1", "p-3"],
                4: ["p-0", "p-3", "p-4"],
            }[index]
        )


def test_a_newer_curriculum_fences():
    world = World(swarm_settings(), random.Random(0))
    with pytest.raises(FencedError, match="newer curriculum"):
        world.write(CurriculumStart(run=RUN, incarnation=99, config_digest="c"))

import pickle

import pytest
from made_issue import group_issue

from agentjet.accounting.ledger import CurriculumView, LedgerView
from agentjet.errors import RecordError
from agentjet.schemas.ids import GroupId, RunId, Version
from agentjet.schemas.ledger import (
    CurriculumStart,
    DropReason,
    GroupDrop,
    LearnerStart,
    LearnerStep,
    RunFinish,
)

RUN = RunId("run-abc")


def start(incarnation, base=0):
    return LearnerStart(
        run=RUN, model="m", incarnation=incarnation, base_step=base, cursor=1, config_digest="c", fold_digest="f"
    )


def step(incarnation, number, groups=2):
    names = tuple(GroupId(f"p-{number}{place}") for place in range(groups))
    return LearnerStep(
        run=RUN, model="m", incarnation=incarnation, step=number, cursor=1, members=(), groups=names, digest="d"
    )


def drop(incarnation, rank):
    return GroupDrop(
        run=RUN, model="m", incarnation=incarnation, group=GroupId("p-9"), rank=rank, reason=DropReason.TOO_FEW
    )


def view_of(*records):
    view = LedgerView()
    for sequence, record in enumerate(records, 1):
        view.apply(sequence, record)
    return view


def test_steps_make_versions_and_the_last_is_the_head():
    assert view_of().head is None
    view = view_of(start(1), step(1, 1), step(1, 2))
    assert (view.incarnation, view.num_steps, view.num_groups) == (1, 2, 4)
    assert view.head == Version(1, 2)
    assert view.versions == {Version(1, 0): 1, Version(1, 1): 2, Version(1, 2): 3}


def test_a_learner_that_starts_again_gives_the_weights_of_its_base_a_second_name():
    view = view_of(start(1), step(1, 1), step(1, 2), start(2, base=1))
    assert view.is_same(Version(1, 1), Version(2, 1))
    assert not view.is_same(Version(1, 0), Version(2, 1))
    assert not view.is_same(Version(1, 2), Version(2, 2)), "one is void, the other is not there"
    view.apply(5, step(2, 2))
    assert not view.is_same(Version(1, 2), Version(2, 2)), "another step was taken in its place"
    view.apply(6, start(3, base=2))
    assert view.is_same(Version(2, 2), Version(3, 2))


def test_a20_a_start_from_an_older_step_voids_what_follows_it():
    view = view_of(start(1), *(step(1, number) for number in range(1, 11)), start(2, base=8))
    assert view.head == Version(2, 8)
    assert view.num_groups == 16
    assert view.is_valid(Version(1, 8))
    assert not view.is_valid(Version(1, 9))
    assert not view.is_valid(Version(1, 10))
    view.apply(20, step(2, 9, groups=3))
    assert view.head == Version(2, 9)
    assert view.num_groups == 19
    assert not view.is_valid(Version(1, 9))


def test_drops_after_the_base_are_void_and_may_be_recorded_again():
    view = view_of(start(1), drop(1, 3), step(1, 1), drop(1, 5), step(1, 2), drop(1, 7), start(2, base=2))
    assert view.dropped == {3, 5}
    view.apply(8, drop(2, 7))
    view.apply(9, drop(2, 5))
    assert (view.dropped, view.num_dropped) == ({3, 5, 7}, 3)
    assert view_of(start(1), drop(1, 3), start(2)).dropped == frozenset()


@pytest.mark.parametrize(
    "records",
    [
        (step(1, 1),),
        (start(1), step(2, 1)),
        (start(1), step(1, 2)),
        (start(2), start(2)),
        (start(1), start(2, base=1)),
        (start(1), start(2), drop(1, 0)),
    ],
)
def test_a_chain_that_can_not_be_is_refused(records):
    with pytest.raises(RecordError, match="LEDGER"):
        view_of(*records)


def issue(index, rank, pool="p"):
    return group_issue(RUN, index, pool=pool, ranks={"m": rank}, deadline_seconds=1.0)


def test_the_curriculum_numbers_groups_by_pool_and_ranks_by_model():
    view = CurriculumView()
    records = (CurriculumStart(run=RUN, incarnation=1, config_digest="c"), issue(0, 0), issue(0, 1, "q"), issue(1, 2))
    for sequence, record in enumerate(records, 1):
        view.apply(sequence, record)
    assert (view.next_index("p"), view.next_index("q"), view.num_issued("m")) == (2, 1, 3)
    assert view.models == ("m",)
    with pytest.raises(RecordError, match="rank 2 of m follows 2"):
        view.apply(9, issue(2, 2))
    with pytest.raises(RecordError, match="group 1 of pool p follows group 1"):
        view.apply(9, issue(1, 3))


def test_a_new_curriculum_reopens_a_finished_run():
    view = CurriculumView()
    view.apply(1, CurriculumStart(run=RUN, incarnation=1, config_digest="c"))
    view.apply(2, RunFinish(run=RUN, reason="steps"))
    assert view.finish is not None
    view.apply(3, CurriculumStart(run=RUN, incarnation=2, config_digest="c"))
    assert view.finish is None


def test_views_do_not_grow_with_what_records_hold():
    """A long run has millions of slots; their names, tasks and figures stay in the stream."""
    curriculum, learner = CurriculumView(), view_of(start(1))
    large = issue(0, 0).model_copy(update={"task": {"text": "x" * 100_000}})
    curriculum.apply(1, large)
    taken = step(1, 1).model_copy(update={"members": tuple(f"p-0.{member}" for member in range(10_000))})
    learner.apply(2, taken)
    assert len(pickle.dumps((curriculum, learner))) < 2_000

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjet.accounting.fold import LearnerFold
from agentjet.errors import RecordError
from agentjet.schemas.ids import GroupId, RunId
from agentjet.schemas.ledger import DropReason
from agentjet.schemas.sample import MergeReport, Sample, SampledCall, Tombstone, TombstoneReason

RUN = RunId("run-abc")


def sample(rank, member=0, *, size=1, reward=1.0, agent_rewards=None, call_rewards=()):
    return Sample(
        run=RUN,
        model="m",
        ticket=f"p-{rank}.{member}.0",
        group=GroupId(f"p-{rank}"),
        member=member,
        rank=rank,
        group_size=size,
        reward=reward,
        agent_rewards=agent_rewards or {},
        segments=(),
        calls=tuple(
            SampledCall(call=str(place), num_terms=1, versions=("1-0",), reward=one)
            for place, one in enumerate(call_rewards)
        ),
        term_segment=(),
        term_offset=(),
        term_logprob=(),
        report=MergeReport(num_calls=0, num_branches=0, num_row_tokens=0, num_tree_tokens=0),
    )


def tombstone(rank, member=0, *, size=1, reason=TombstoneReason.DEAD):
    return Tombstone(
        run=RUN,
        model="m",
        ticket=f"p-{rank}.{member}.0",
        group=GroupId(f"p-{rank}"),
        member=member,
        rank=rank,
        group_size=size,
        reason=reason,
    )


def fold_of(batch=2, w=0, min_group=1, **options):
    return LearnerFold(batch_groups=batch, straggler_bound=w, min_group=min_group, **options)


def pop_all(fold):
    drops, batches = fold.pop_drops(), []
    while batch := fold.pop_batch():
        batches.append(batch)
    return drops, batches


def ranks_of(batches):
    return [[group.rank for group in batch.groups] for batch in batches]


def restored(fold, **options):
    state = json.loads(json.dumps(fold.to_dict()))
    again = LearnerFold.from_dict(state, **({"batch_groups": 2, "min_group": 1} | options))
    assert again.to_dict() == fold.to_dict()
    assert again.digest() == fold.digest()
    return again


def test_a4_kill_after_a_checkpoint_trains_each_group_once():
    fold, trained, log = fold_of(), [], [sample(rank) for rank in range(8)]
    for sequence, record in enumerate(log[:5], 1):
        fold.apply(sequence, record)
    trained += ranks_of([fold.pop_batch()])
    fold = restored(fold)
    for sequence, record in enumerate(log, 1):
        fold.apply(sequence, record)
    trained += ranks_of(pop_all(fold)[1])
    assert trained == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a19_a_member_far_below_its_mate_survives_a_checkpoint_between_them():
    fold = fold_of(batch=1)
    fold.apply(10, sample(0, 0, size=2))
    for sequence in range(11, 400):
        fold.apply(sequence, sample(sequence))
    assert fold.cursor == 10
    fold = restored(fold, batch_groups=1)
    fold.apply(500, sample(0, 1, size=2))
    batch = fold.pop_batch()
    assert batch is not None
    assert [member.sequence for member in batch.members] == [10, 500]


def test_a20_another_batch_size_after_a_restart_goes_on_from_the_groups_trained():
    fold = fold_of(batch=2)
    for rank in range(7):
        fold.apply(rank + 1, sample(rank))
    assert ranks_of([fold.pop_batch()]) == [[0, 1]]
    fold = LearnerFold.from_dict(fold.to_dict(), batch_groups=3, min_group=1)
    assert ranks_of([fold.pop_batch()]) == [[2, 3, 4]]
    assert fold.pop_batch() is None
    fold.apply(8, sample(7))
    batch = fold.pop_batch()
    assert batch is not None
    assert (batch.step, ranks_of([batch])) == (3, [[5, 6, 7]])


def test_a22_tombstones_complete_a_group():
    fold = fold_of(batch=1, min_group=2)
    fold.apply(1, sample(0, 0, size=3))
    fold.apply(2, tombstone(0, 1, size=3, reason=TombstoneReason.POISON))
    assert fold.pop_batch() is None
    fold.apply(3, sample(0, 2, size=3))
    batch = fold.pop_batch()
    assert batch is not None
    assert [member.slot for member in batch.members] == ["p-0.0", "p-0.2"]


def test_a23_a_group_that_never_called_the_model_is_dropped_as_unused():
    fold = fold_of(batch=1)
    fold.apply(1, tombstone(0, 0, size=2, reason=TombstoneReason.UNUSED))
    fold.apply(2, tombstone(0, 1, size=2, reason=TombstoneReason.UNUSED))
    assert [(drop.rank, drop.reason, drop.position) for drop in fold.pop_drops()] == [(0, DropReason.UNUSED, 2)]
    fold.apply(3, sample(1, 0, size=2))
    fold.apply(4, tombstone(1, 1, size=2, reason=TombstoneReason.UNUSED))
    assert ranks_of([fold.pop_batch()]) == [[1]]


def test_r7_one_reward_and_three_failures_train_nothing_and_are_counted():
    fold = fold_of(batch=1, min_group=2)
    fold.apply(1, sample(0, 0, size=4))
    for member in (1, 2, 3):
        fold.apply(1 + member, tombstone(0, member, size=4))
    assert [drop.reason for drop in fold.pop_drops()] == [DropReason.TOO_FEW]
    assert fold.pop_batch() is None


def test_r10_a_constant_group_is_dropped_by_setting_and_the_mixed_one_trains():
    fold = fold_of(batch=1, min_group=2, drop_constant_groups=True)
    for sequence, record in enumerate(
        [sample(0, 0, size=2), sample(0, 1, size=2), sample(1, 0, size=2), sample(1, 1, size=2, reward=0.0)], 1
    ):
        fold.apply(sequence, record)
    drops, batches = pop_all(fold)
    assert [(drop.rank, drop.reason) for drop in drops] == [(0, DropReason.CONSTANT)]
    assert ranks_of(batches) == [[1]]


def test_equal_rewards_with_unequal_agent_rewards_are_not_constant():
    fold = fold_of(batch=1, min_group=2, drop_constant_groups=True)
    fold.apply(1, sample(0, 0, size=2, agent_rewards={"a": 1.0}))
    fold.apply(2, sample(0, 1, size=2, agent_rewards={"a": 0.0}))
    assert ranks_of([fold.pop_batch()]) == [[0]]


@pytest.mark.parametrize(
    ("calls", "credits_calls", "is_dropped"),
    [
        (((0.0, 1.0), (0.0, 1.0)), True, False),
        (((0.0, 1.0), (0.0, 1.0)), False, True),
        (((0.5, 0.5), (0.5,)), True, True),
        (((0.5, None), (0.7,)), True, True),
    ],
)
def test_r10_rewards_of_single_calls_tell_what_is_constant_where_they_are_credited(calls, credits_calls, is_dropped):
    options = {"batch_groups": 1, "min_group": 2, "drop_constant_groups": True, "credits_calls": credits_calls}
    fold = LearnerFold(**options)
    fold.apply(1, sample(0, 0, size=2, call_rewards=calls[0]))
    fold = restored(fold, **options)
    fold.apply(2, sample(0, 1, size=2, call_rewards=calls[1]))
    drops, batches = pop_all(restored(fold, **options))
    assert [drop.reason for drop in drops] == [DropReason.CONSTANT] * is_dropped
    assert ranks_of(batches) == ([] if is_dropped else [[0]])


def test_without_overtaking_a_batch_waits_for_the_slow_group():
    fold = fold_of(batch=2)
    for sequence, rank in enumerate((1, 2, 3), 1):
        fold.apply(sequence, sample(rank))
    assert fold.pop_batch() is None
    assert fold.missing == (0,)
    fold.apply(4, sample(0))
    drops, batches = pop_all(fold)
    assert (drops, ranks_of(batches)) == ([], [[0, 1], [2, 3]])
    assert [batch.position for batch in batches] == [4, 4]
    assert [batch.cursor for batch in batches] == [2, 5]


def test_a_slow_group_may_be_overtaken_by_w_batches_and_no_more():
    fold = fold_of(batch=2, w=1)
    for sequence, rank in enumerate((1, 2, 3, 4), 1):
        fold.apply(sequence, sample(rank))
    assert ranks_of(pop_all(fold)[1]) == [[1, 2]]
    fold.apply(5, sample(0))
    assert ranks_of(pop_all(fold)[1]) == [[0, 3]]


def test_dropped_groups_leave_the_rank_count():
    fold = fold_of(batch=2)
    for sequence, record in enumerate([tombstone(0), tombstone(1), sample(2), sample(3)], 1):
        fold.apply(sequence, record)
    assert ranks_of(pop_all(fold)[1]) == [[2, 3]]


def test_a_dropped_group_does_not_count_as_one_that_may_be_passed():
    fold = fold_of(batch=1)
    for sequence, record in enumerate([tombstone(0), sample(2)], 1):
        fold.apply(sequence, record)
    assert fold.pop_batch() is None
    fold.apply(3, sample(1))
    assert ranks_of(pop_all(fold)[1]) == [[1], [2]]


def test_drops_popped_after_the_checkpointed_batch_come_out_again():
    fold = fold_of(batch=1)
    for sequence, record in enumerate([tombstone(0), sample(1), tombstone(2), tombstone(3)], 1):
        fold.apply(sequence, record)
        if sequence == 2:
            assert [drop.rank for drop in fold.pop_drops()] == [0]
            assert fold.pop_batch() is not None
    assert [drop.rank for drop in fold.pop_drops()] == [2, 3]
    assert fold.pop_drops() == []
    assert [drop.rank for drop in restored(fold, batch_groups=1).pop_drops()] == [2, 3]


def test_a_finished_run_trains_what_is_left_over_once_everything_is_there():
    fold = fold_of(batch=2)
    for sequence, rank in enumerate((0, 1, 3), 1):
        fold.apply(sequence, sample(rank))
    fold.finish(4)
    assert ranks_of(pop_all(fold)[1]) == [[0, 1]]
    fold.apply(4, tombstone(2))
    drops, batches = pop_all(fold)
    assert ([drop.rank for drop in drops], ranks_of(batches)) == ([2], [[3]])


def test_a_run_that_is_reopened_after_its_end_makes_whole_batches_again():
    fold = fold_of(batch=2)
    fold.apply(1, sample(0))
    fold.finish(1)
    assert ranks_of(pop_all(fold)[1]) == [[0]]
    fold = restored(fold)
    fold.apply(2, sample(1))
    assert fold.pop_batch() is None
    fold.apply(3, sample(2))
    assert ranks_of(pop_all(fold)[1]) == [[1, 2]]


def test_a_record_that_contradicts_the_log_is_refused():
    fold = fold_of()
    fold.apply(5, sample(0, 0, size=2))
    with pytest.raises(RecordError, match="which is that of group p-0 with 2 members"):
        fold.apply(6, sample(0, 2, size=3))
    with pytest.raises(RecordError, match="read up to 5 already"):
        fold.apply(4, sample(1))


def test_a_state_of_another_version_is_refused():
    with pytest.raises(RecordError, match="fold state of version 9"):
        LearnerFold.from_dict({"version": 9}, batch_groups=1)


@st.composite
def logs(draw):
    """A log of whole groups whose slots arrive in any order; some groups stay incomplete."""
    sizes = draw(st.lists(st.integers(1, 2), min_size=1, max_size=12))
    records = [
        sample(rank, member, size=size, reward=float(draw(st.integers(0, 1))))
        if draw(st.integers(0, 3))
        else tombstone(rank, member, size=size, reason=draw(st.sampled_from(TombstoneReason)))
        for rank, size in enumerate(sizes)
        for member in range(size)
    ]
    random.Random(draw(st.integers(0, 999))).shuffle(records)
    records = records[: draw(st.integers(1, len(records)))]
    sequences = sorted(draw(st.sets(st.integers(1, 500), min_size=len(records), max_size=len(records))))
    return list(zip(sequences, records, strict=True))


OPTIONS = st.fixed_dictionaries(
    {
        "batch_groups": st.integers(1, 3),
        "straggler_bound": st.integers(0, 2),
        "min_group": st.integers(1, 2),
        "drop_constant_groups": st.booleans(),
    }
)


def by_the_rule(log, options):
    """Batches and drops straight from the sentence in DESIGN, by looking at every prefix anew."""
    size, w = options["batch_groups"], options["straggler_bound"]
    batches, taken, drops = [], set(), {}
    for end in range(1, len(log) + 1):
        groups = {}
        for _, record in log[:end]:
            groups.setdefault(record.rank, []).append(record)
        complete = {rank for rank, records in groups.items() if len(records) == records[0].group_size}
        for rank in sorted(complete):
            rewards = [record.reward for record in groups[rank] if isinstance(record, Sample)]
            is_constant = options["drop_constant_groups"] and len(set(rewards)) == 1
            if len(rewards) < options["min_group"] or is_constant:
                drops.setdefault(rank, log[end - 1][0])
        while True:
            usable = sorted(complete - drops.keys() - taken)
            needed, rank = (len(batches) + 1 - w) * size, -1
            while needed > 0 and (rank := rank + 1) in complete:
                needed -= rank not in drops
            if needed > 0 or len(usable) < size:
                break
            batches.append((usable[:size], log[end - 1][0]))
            taken |= set(usable[:size])
    return batches, drops


@settings(max_examples=150)
@given(logs(), OPTIONS)
def test_the_fold_follows_the_rule(log, options):
    fold = LearnerFold(**options)
    for sequence, record in log:
        fold.apply(sequence, record)
    drops, batches = pop_all(fold)
    wanted_batches, wanted_drops = by_the_rule(log, options)
    assert [([group.rank for group in batch.groups], batch.position) for batch in batches] == wanted_batches
    assert {drop.rank: drop.position for drop in drops} == wanted_drops
    assert [batch.step for batch in batches] == list(range(1, len(batches) + 1))


@settings(max_examples=150)
@given(logs(), OPTIONS, st.data())
def test_chunks_restores_and_repeats_change_nothing(log, options, data):
    whole = LearnerFold(**options)
    for sequence, record in log:
        whole.apply(sequence, record)
    wanted = pop_all(whole)

    fold, drops, batches, done = LearnerFold(**options), {}, [], 0
    while done < len(log):
        step = data.draw(st.integers(1, len(log) - done))
        for sequence, record in log[done : done + step]:
            fold.apply(sequence, record)
        done += step
        if data.draw(st.booleans()):
            drops |= {drop.rank: drop for drop in fold.pop_drops()}
            if batch := fold.pop_batch():
                batches.append(batch)
        if data.draw(st.booleans()):
            fold = restored(fold, **options)
        if data.draw(st.booleans()):
            for sequence, record in log[:done]:
                if sequence >= fold.cursor:
                    fold.apply(sequence, record)
    last_drops, last_batches = pop_all(fold)
    drops |= {drop.rank: drop for drop in last_drops}
    assert batches + last_batches == wanted[1]
    assert drops == {drop.rank: drop for drop in wanted[0]}


@settings(max_examples=100)
@given(logs(), OPTIONS)
def test_nothing_above_the_cursor_is_forgotten_and_nothing_below_it_is_needed(log, options):
    fold = LearnerFold(**options)
    for sequence, record in log:
        fold.apply(sequence, record)
    drops, batches = pop_all(fold)
    settled = {group.rank for batch in batches for group in batch.groups} | {drop.rank for drop in drops}
    unsettled = [sequence for sequence, record in log if record.rank not in settled]
    assert fold.cursor == min(unsettled, default=fold.position + 1)
    if batches and not drops and batches[-1].position == fold.position:
        assert batches[-1].cursor == fold.cursor

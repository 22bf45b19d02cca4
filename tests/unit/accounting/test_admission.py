from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjet.accounting.admission import ModelLoad, PoolMix, max_staleness
from agentjet.accounting.fold import LearnerFold
from agentjet.schemas.ids import GroupId, RunId
from agentjet.schemas.sample import MergeReport, Sample, Tombstone, TombstoneReason


def load(**changes):
    fields = {
        "batch_groups": 4,
        "admission_bound": 1,
        "num_steps": 0,
        "num_trained": 0,
        "num_issued": 0,
        "num_dropped": 0,
    }
    return ModelLoad(**(fields | changes))


def test_a17_dropped_groups_leave_the_count_at_once():
    assert load(num_issued=8).room == 0
    assert load(num_issued=8, num_dropped=5).room == 5


def test_room_is_what_the_formula_says():
    for steps in range(4):
        for issued in range(4 * steps, 40):
            room = load(num_steps=steps, num_trained=4 * steps, num_issued=issued).room
            assert room == max(0, (1 + steps + 1) * 4 - issued)


def test_a_bound_of_zero_is_on_policy():
    on_policy = load(admission_bound=0, num_issued=4)
    assert on_policy.room == 0
    assert load(admission_bound=0, num_issued=4, num_steps=1, num_trained=4).room == 4


def test_nothing_is_issued_past_an_evaluation():
    assert load(barrier_step=0).room == 0
    assert load(barrier_step=1).room == 4
    assert load(barrier_step=2, num_steps=1, num_trained=4, num_issued=4).room == 4
    assert load(barrier_step=9).room == 8


def test_the_last_step_caps_what_is_issued():
    ending = load(last_step=3, num_steps=2, num_trained=8, num_issued=12)
    assert (ending.room, ending.is_final, ending.is_done) == (0, True, False)
    assert load(last_step=3, num_steps=2, num_trained=8, num_issued=12, num_dropped=1).room == 1
    assert load(last_step=3, num_steps=3, num_trained=12, num_issued=12).is_done


def test_another_batch_size_goes_on_from_the_groups_trained():
    assert load(batch_groups=8, num_steps=8, num_trained=32, num_issued=32).room == 16


def test_voided_steps_leave_no_room_until_their_samples_are_trained_again():
    assert load(num_steps=8, num_trained=32, num_issued=44).room == 0


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.integers(50, 300))
def test_offered_shares_follow_the_weights(weights, turns):
    mix, offered = PoolMix({f"p{place}": weight for place, weight in enumerate(weights)}), Counter()
    for _ in range(turns):
        pool = mix.pick(f"p{place}" for place in range(len(weights)))
        assert pool is not None
        mix.record(pool)
        offered[pool] += 1
    for place, weight in enumerate(weights):
        assert offered[f"p{place}"] == pytest.approx(turns * weight / sum(weights), abs=len(weights) + 1)


def test_a_pool_that_sat_out_does_not_take_over():
    mix = PoolMix({"a": 1.0, "b": 1.0})
    for _ in range(50):
        mix.record("a")
    turns = []
    for _ in range(8):
        pool = mix.pick(["a", "b"])
        assert pool is not None
        mix.record(pool)
        turns.append(pool)
    assert turns.count("b") <= 5
    assert mix.pick([]) is None


def test_the_mix_is_a_function_of_the_issues():
    one, two = PoolMix({"a": 3.0, "b": 1.0}), PoolMix({"a": 3.0, "b": 1.0})
    issued = []
    for _ in range(20):
        issued.append(one.pick(["a", "b"]))
        one.record(issued[-1])
    for pool in issued:
        two.record(pool)
    assert [one.pick(["a", "b"]) for _ in range(3)] == [two.pick(["a", "b"]) for _ in range(3)]


def slot(rank, *, is_dead):
    fields = {"run": RunId("r-a"), "model": "m", "ticket": f"p-{rank}.0.0", "group": GroupId(f"p-{rank}")}
    fields |= {"member": 0, "rank": rank, "group_size": 1}
    if is_dead:
        return Tombstone(**fields, reason=TombstoneReason.DEAD)
    report = MergeReport(num_calls=0, num_branches=0, num_row_tokens=0, num_tree_tokens=0)
    nothing = {"segments": (), "calls": (), "term_segment": (), "term_offset": (), "term_logprob": ()}
    return Sample(**fields, reward=1.0, report=report, **nothing)


@settings(max_examples=80)
@given(st.integers(1, 3), st.integers(0, 3), st.integers(0, 3), st.data())
def test_staleness_never_exceeds_the_bound(batch, a, w, data):
    fold = LearnerFold(batch_groups=batch, straggler_bound=w, min_group=1)
    issued_at, running, dropped, steps = {}, [], 0, 0
    for sequence in range(1, 61):
        state = load(
            batch_groups=batch,
            admission_bound=a,
            num_steps=steps,
            num_trained=steps * batch,
            num_issued=len(issued_at),
            num_dropped=dropped,
        )
        for _ in range(state.room):
            running.append(len(issued_at))
            issued_at[len(issued_at)] = steps
        assert running, "with a bound on stragglers something always runs"
        rank = running.pop(data.draw(st.integers(0, len(running) - 1)))
        fold.apply(sequence, slot(rank, is_dead=data.draw(st.integers(0, 4)) == 0))
        dropped += len(fold.pop_drops())
        while formed := fold.pop_batch():
            for group in formed.groups:
                assert steps - issued_at[group.rank] <= max_staleness(a, w)
            steps += 1


def test_the_bound_on_staleness_is_tight():
    a, w = 2, 3
    fold = LearnerFold(batch_groups=1, straggler_bound=w, min_group=1)
    steps, sequence = 0, 0
    # Rank a, issued at step 0, is held back as long as the rule allows.
    for sequence, rank in enumerate([0, 1, *range(3, 20)], 1):
        fold.apply(sequence, slot(rank, is_dead=False))
        if fold.pop_batch() is None:
            break
        steps += 1
    fold.apply(sequence + 1, slot(a, is_dead=False))
    formed = fold.pop_batch()
    assert formed is not None
    staleness = [steps for group in formed.groups if group.rank == a]
    assert staleness == [max_staleness(a, w)]

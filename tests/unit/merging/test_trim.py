import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.merging.forest import plant
from agentjet.merging.trie import leaf_paths
from agentjet.merging.trim import Trimmed, trim
from agentjet.schemas.ids import GroupId, RunId
from agentjet.schemas.sample import MergeReport, Sample, SampledCall, Segment

SAMPLE = Sample(
    run=RunId("run-abcdef"),
    model="m",
    ticket="p-0.0.0",
    group=GroupId("p-0"),
    member=0,
    rank=0,
    group_size=1,
    reward=0.0,
    segments=(Segment(parent=-1, ids=(1, 2, 3)), Segment(parent=0, ids=(4, 5)), Segment(parent=0, ids=(6, 7, 8))),
    calls=(SampledCall(call="a", num_terms=2, versions=()), SampledCall(call="b", num_terms=3, versions=())),
    term_segment=(1, 1, 2, 2, 2),
    term_offset=(0, 1, 0, 1, 2),
    term_logprob=(-1.0, -2.0, -3.0, -4.0, -5.0),
    report=MergeReport(num_calls=2, num_branches=2, num_row_tokens=0, num_tree_tokens=0),
)


@pytest.mark.parametrize(
    ("limit", "paths", "num_terms", "logprobs", "num_shortened"),
    [
        (5, [(1, 2, 3, 4, 5), (1, 2, 3, 6, 7), (2, 3, 6, 7, 8)], [2, 3], (-1.0, -2.0, -3.0, -4.0, -5.0), 1),
        (4, [(1, 2, 3, 4), (1, 2, 3, 6), (2, 3, 4, 5), (3, 6, 7, 8)], [2, 3], (-1.0, -2.0, -3.0, -4.0, -5.0), 3),
        (3, [(1, 2, 3), (3, 4, 5), (6, 7, 8)], [2, 2], (-1.0, -2.0, -4.0, -5.0), 4),
        (2, [(1, 2), (4, 5), (7, 8)], [1, 1], (-2.0, -5.0), 2),
        (1, [(1,)], [0, 0], (), 0),
    ],
)
def test_n3_a_branch_beyond_the_limit_keeps_its_final_action_and_counts(
    limit, paths, num_terms, logprobs, num_shortened
):
    cut = trim(SAMPLE, limit)
    assert leaf_paths(cut.sample.segments) == paths
    assert [call.num_terms for call in cut.sample.calls] == num_terms
    assert cut.sample.term_logprob == logprobs
    assert (cut.num_lost, cut.num_shortened) == (5 - len(logprobs), num_shortened)
    assert tokens(cut.sample) == tuple({-1.0: 4, -2.0: 5, -3.0: 6, -4.0: 7, -5.0: 8}[one] for one in logprobs)


def tokens(sample):
    """The sampled tokens, as the terms find them."""
    places = zip(sample.term_segment, sample.term_offset, strict=True)
    return tuple(sample.segments[segment].ids[offset] for segment, offset in places)


@pytest.mark.parametrize("limit", [0, 6, 100])
def test_a_sample_within_the_limit_is_untouched(limit):
    assert trim(SAMPLE, limit) == Trimmed(SAMPLE)


def conversation(num_turns, num_sampled):
    """A growing history: five tokens that a user said, then `num_sampled` sampled ones, and so on."""
    return SAMPLE.model_copy(
        update={
            "segments": (Segment(parent=-1, ids=tuple(range(num_turns * (5 + num_sampled)))),),
            "calls": tuple(SampledCall(call=str(n), num_terms=num_sampled, versions=()) for n in range(num_turns)),
            "term_segment": (0,) * (num_turns * num_sampled),
            "term_offset": tuple(
                turn * (5 + num_sampled) + 5 + place for turn in range(num_turns) for place in range(num_sampled)
            ),
            "term_logprob": tuple(-float(n) for n in range(num_turns * num_sampled)),
        }
    )


def test_of_the_actions_beyond_the_limit_only_the_final_one_stays():
    cut = trim(conversation(4, 3), 12)
    assert leaf_paths(cut.sample.segments) == [tuple(range(12)), tuple(range(20, 32))]
    assert [call.num_terms for call in cut.sample.calls] == [3, 0, 0, 3]
    assert tokens(cut.sample) == (5, 6, 7, 29, 30, 31)
    assert (cut.num_lost, cut.num_shortened) == (6, 3)


def test_a_final_action_that_several_branches_end_with_stays_once_for_each_call():
    """Two identical replies to one prompt are two terms at one place; a tail that nobody sampled ends a branch too."""
    twice = SAMPLE.model_copy(
        update={
            "segments": (
                Segment(parent=-1, ids=(1, 2, 3, 4, 5)),
                Segment(parent=0, ids=(6,)),
                Segment(parent=0, ids=(7,)),
            ),
            "calls": tuple(SampledCall(call=name, num_terms=2, versions=()) for name in "ab"),
            "term_segment": (0,) * 4,
            "term_offset": (3, 4, 3, 4),
            "term_logprob": (-1.0, -2.0, -3.0, -4.0),
        }
    )
    cut = trim(twice, 3)
    assert leaf_paths(cut.sample.segments) == [(1, 2, 3), (3, 4, 5)]
    assert (tokens(cut.sample), cut.num_lost, cut.num_shortened) == ((4, 5, 4, 5), 0, 4)


@given(num_turns=st.integers(1, 5), num_sampled=st.integers(1, 6), limit=st.integers(1, 60))
def test_no_branch_is_above_the_limit_and_every_term_is_kept_once_or_counted(num_turns, num_sampled, limit):
    whole = conversation(num_turns, num_sampled)
    cut = trim(whole, limit)
    assert max(map(len, leaf_paths(cut.sample.segments))) <= limit
    kept = tokens(cut.sample)
    assert len(set(kept)) == len(kept) == len(whole.term_offset) - cut.num_lost
    assert set(kept) <= set(tokens(whole))
    if limit > num_sampled:
        assert kept[-num_sampled:] == tokens(whole)[-num_sampled:]
    plant([cut.sample])

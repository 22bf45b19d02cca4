import pytest

from agentjet.merging.trie import leaf_paths
from agentjet.merging.trim import trim
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
    ("limit", "paths", "num_terms", "logprobs"),
    [
        (5, [(1, 2, 3, 4, 5), (1, 2, 3, 6, 7)], [2, 2], (-1.0, -2.0, -3.0, -4.0)),
        (4, [(1, 2, 3, 4), (1, 2, 3, 6)], [1, 1], (-1.0, -3.0)),
        (3, [(1, 2, 3)], [0, 0], ()),
    ],
)
def test_branches_end_at_the_limit_and_lost_terms_are_counted(limit, paths, num_terms, logprobs):
    cut, num_lost = trim(SAMPLE, limit)
    assert leaf_paths(cut.segments) == paths
    assert [call.num_terms for call in cut.calls] == num_terms
    assert cut.term_logprob == logprobs
    assert num_lost == 5 - len(logprobs)


@pytest.mark.parametrize("limit", [0, 6, 100])
def test_a_sample_within_the_limit_is_untouched(limit):
    assert trim(SAMPLE, limit) == (SAMPLE, 0)


def test_a_branch_beyond_the_limit_takes_its_segments_along():
    deep = SAMPLE.model_copy(update={"segments": (*SAMPLE.segments[:2], Segment(parent=1, ids=(6, 7, 8)))})
    cut, num_lost = trim(deep, 4)
    assert leaf_paths(cut.segments) == [(1, 2, 3, 4)]
    assert (cut.term_logprob, num_lost) == ((-1.0,), 4)


def test_a_cut_in_one_call_leaves_the_next_ones_terms_alone():
    deep_first = SAMPLE.model_copy(
        update={
            "segments": (
                Segment(parent=-1, ids=(1, 2, 3)),
                Segment(parent=0, ids=(4,) * 9),
                Segment(parent=0, ids=(6, 7, 8)),
            ),
            "term_offset": (7, 8, 0, 1, 2),
        }
    )
    cut, num_lost = trim(deep_first, 6)
    assert [call.num_terms for call in cut.calls] == [0, 3]
    assert (cut.term_logprob, num_lost) == ((-3.0, -4.0, -5.0), 2)

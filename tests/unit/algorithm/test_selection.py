import random

from hypothesis import given
from hypothesis import strategies as st
from made_sample import Row, sample_of_rows

from agentjet.algorithm.aggregation import term_weights
from agentjet.algorithm.selection import keep_calls
from agentjet.config import AlgorithmSettings
from agentjet.merging.trie import ancestry
from agentjet.schemas.sample import Sample


def numbered(rows: list[Row]) -> Sample:
    """A sample whose log-probs tell its terms apart."""
    return sample_of_rows(rows, logprobs=[-float(index) for index in range(sum(len(reply) for _, reply in rows))])


def paths(sample: Sample) -> list[tuple[tuple[int, ...], float]]:
    """Each term's context, itself included, and log-prob."""
    found = []
    for segment, offset, logprob in zip(sample.term_segment, sample.term_offset, sample.term_logprob, strict=True):
        *before, own = ancestry(sample.segments, segment)
        ids = [token for index in before for token in sample.segments[index].ids]
        found.append((tuple(ids) + tuple(sample.segments[own].ids[: offset + 1]), logprob))
    return found


def test_r12_terms_that_left_count_in_no_denominator():
    sample = numbered([([1], list(range(2, 27))), ([1], [40, 41, 42, 43, 44])])
    kept = keep_calls(sample, [True, False])
    lengths = [[call.num_terms for call in kept.calls]]
    assert lengths == [[25, 0]]
    assert term_weights(lengths, AlgorithmSettings(aggregation="token_mean")) == [[1 / 25, 0.0]]


def test_a_sample_whose_calls_all_stay_is_untouched():
    sample = numbered([([1], [2, 3])])
    assert keep_calls(sample, [True]) is sample


def test_a_branch_that_no_term_needs_is_not_computed():
    sample = numbered([([1, 2], [3, 4]), ([1, 2], [7] * 50), ([1, 2, 7], [9])])
    assert sum(len(segment.ids) for segment in keep_calls(sample, [True, False, False]).segments) == 4
    assert sum(len(segment.ids) for segment in keep_calls(sample, [False, False, True]).segments) == 4


def test_a_sample_may_lose_every_term():
    kept = keep_calls(numbered([([1], [2, 3])]), [False])
    assert (kept.term_logprob, kept.segments, kept.calls[0].num_terms) == ((), (), 0)


@given(st.integers(0, 10_000), st.data())
def test_terms_that_stay_keep_their_context(seed, data):
    rng = random.Random(seed)
    rows = [
        (
            [1, *(rng.randrange(3) for _ in range(rng.randrange(5)))],
            [rng.randrange(3) for _ in range(rng.randrange(1, 5))],
        )
        for _ in range(rng.randrange(1, 5))
    ]
    sample = numbered(rows)
    is_kept = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    owners = [kept for kept, (_, reply) in zip(is_kept, rows, strict=True) for _ in reply]
    wanted = [path for path, kept in zip(paths(sample), owners, strict=True) if kept]
    assert paths(keep_calls(sample, is_kept)) == wanted

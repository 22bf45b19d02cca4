"""The cut of a forest: what it covers, what it hides, and that it is cheap."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentjet.merging import Forest, TokenTrie
from agentjet.training import attention_plan
from agentjet.training.attention_plan import plan_attention, subtree_ends


def make_forest(sequences: list[list[int]]) -> Forest:
    trie = TokenTrie()
    for sequence in sequences:
        trie.insert(sequence)
    segments = trie.segments()
    lengths = np.array([len(segment.ids) for segment in segments], np.int64)
    depths = [0] * len(segments)
    for index, segment in enumerate(segments):
        if segment.parent >= 0:
            depths[index] = depths[segment.parent] + len(segments[segment.parent].ids)
    return Forest(
        segments=segments,
        starts=np.cumsum(lengths) - lengths,
        ids=np.array([token for segment in segments for token in segment.ids], np.int64),
        depths=np.concatenate([base + np.arange(length) for base, length in zip(depths, lengths, strict=True)]),
        term_sample=np.empty(0, np.int64),
        term_target=np.empty(0, np.int64),
        term_predictor=np.empty(0, np.int64),
    )


def visible(forest: Forest, window: int) -> np.ndarray:
    """[tokens, tokens] walked up token by token."""
    parents = np.arange(-1, forest.num_tokens - 1)
    for segment, start in zip(forest.segments, forest.starts, strict=True):
        last = forest.starts[segment.parent] + len(forest.segments[segment.parent].ids) - 1
        parents[start] = last if segment.parent >= 0 else -1
    found = np.zeros((forest.num_tokens, forest.num_tokens), bool)
    for query in range(forest.num_tokens):
        key, steps = query, 0
        while key >= 0 and not (window and steps >= window):
            found[query, key] = True
            key, steps = int(parents[key]), steps + 1
    return found


Sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=8)


@given(Sequences, st.sampled_from([0, 1, 4]), st.sampled_from([0, 30, 10**6]), st.sampled_from([1, 3, 32]))
def test_each_token_sees_its_ancestors_within_the_window_and_nothing_else(sequences, window, run_cost, grid):
    forest = make_forest(sequences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_plan, "RUN_COST", run_cost)
        patch.setattr(attention_plan, "GRID_TOKENS", grid)
        plan = plan_attention(forest)
        found = np.zeros((forest.num_tokens, forest.num_tokens), bool)
        for run in plan.runs(window):
            keys = torch.arange(forest.num_tokens)[run.keys].numpy()
            assert len(keys) == run.num_keys
            seen = np.ones((run.num_queries, run.num_keys), bool)
            seen[:, run.masked_from :] = (plan.mask(run, torch.float32)[:, 0] == 0).numpy()
            found[run.queries, keys] = seen
    np.testing.assert_array_equal(found, visible(forest, window))


@given(Sequences, st.sets(st.integers(1, 20)))
def test_borders_are_kept_and_a_stretch_has_the_runs_of_the_whole(sequences, borders):
    forest = make_forest(sequences)
    inner = sorted(border for border in borders if border < forest.num_tokens)
    plan = plan_attention(forest, borders=inner)
    edges = [0, *inner, forest.num_tokens]
    parts = [run for start, stop in pairwise(edges) for run in plan.stretch(start, stop).runs()]
    assert [run.queries for run in parts] == [run.queries for run in plan.runs()]


def test_a_stretch_ends_between_runs():
    with pytest.raises(ValueError, match="no run"):
        plan_attention(make_forest([list(range(10))])).stretch(0, 5)


def test_a_chain_reads_its_keys_where_they_lie():
    plan = plan_attention(make_forest([list(range(2000))]))
    assert all(isinstance(run.keys, slice) for run in plan.runs())
    assert plan.num_pairs() <= 1.1 * 2000 * 2001 / 2


def test_the_runs_of_a_group_compute_few_hidden_pairs():
    plan = plan_attention(make_forest([[*range(1000), 2000 + i, *range(60)] for i in range(16)]))
    exact = int((plan.forest.depths + 1).sum())
    assert plan.num_pairs() <= 1.1 * exact


def test_short_siblings_share_a_run():
    plan = plan_attention(make_forest([[*range(20), 2000 + i] for i in range(16)]))
    assert len(plan.runs()) == 1


def test_a_window_that_no_path_is_longer_than_is_none():
    plan = plan_attention(make_forest([list(range(100))]))
    assert plan.runs(101) is plan.runs(None)
    assert plan.runs(99) is not plan.runs(None)


def test_subtree_ends_are_those_of_the_deepest_descendants():
    assert subtree_ends(make_forest([[1, 2, 3], [1, 2, 4], [9]])).tolist() == [4, 4, 3, 4, 5]

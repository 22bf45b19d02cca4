"""The workloads, rows and packing that `benchmarks/merge_speed.py` measures."""

import itertools
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import merge_rows
import merge_workload
from merge_rows import linear_rows, micro_batches, unmerged_rows
from merge_workload import Episode, Turn

from agentjet.merging import plant


def tokens(name: str) -> tuple[int, int, int]:
    """As unmerged rows, after linear merging, as a forest; each with the partner's two tokens where there is one."""
    workload = merge_workload.SHAPES[name]()
    rows, linear = unmerged_rows(workload.groups), linear_rows(workload.groups)
    forest = plant([sample for group in workload.samples() for sample in group])
    assert len(forest.term_target) == sum(len(row.targets) for row in rows) == sum(len(row.targets) for row in linear)
    return sum(len(row.ids) for row in rows), sum(len(row.ids) for row in linear), forest.num_tokens


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chain30", (30 * 528 + 48 * 435 + 2, 512 + 30 * 48 - 32 + 2, 512 + 30 * 48 - 32 + 2)),
        ("group16", (16 * 1312, 16 * 1312, 1280 + 16 * 32)),
        ("group16x5turns", (16 * (5 * 456 + 24 * 10), 16 * (448 + 5 * 24 - 16), 448 + 16 * (5 * 24 - 16))),
    ],
)
def test_a_workload_has_the_lengths_that_its_shape_says(name, expected):
    # Two drawn completions may begin with the same token, which a tree then holds once.
    rows, linear, tree = tokens(name)
    assert (rows, linear) == expected[:2]
    assert expected[2] - 3 <= tree <= expected[2]


@pytest.mark.parametrize("name", ["thinkdrop30", "werewolf"])
def test_linear_merging_joins_nothing_where_history_is_rendered_afresh(name):
    rows, linear, tree = tokens(name)
    assert linear == rows
    assert rows > 5 * tree


@pytest.mark.parametrize("name", ["window5", "summary10"])
def test_linear_merging_joins_some_where_history_is_cut(name):
    rows, linear, tree = tokens(name)
    assert rows > linear > tree


def test_interleaved_agents_are_joined_to_their_own_calls():
    turns = [Turn([1, 2], [3]), Turn([1, 7], [8]), Turn([1, 2, 3, 4], [5]), Turn([1, 7, 8, 9], [6])]
    rows = linear_rows([[Episode(1.0, turns)]])
    assert [(row.ids, row.targets, row.calls) for row in rows] == [
        ([1, 2, 3, 4, 5], [2, 4], [0, 2]),
        ([1, 7, 8, 9, 6], [2, 4], [1, 3]),
    ]


def test_a_call_of_another_episode_is_never_continued():
    rows = linear_rows([[Episode(1.0, [Turn([1], [2])]), Episode(0.0, [Turn([1, 2, 3], [4])])]])
    assert [row.ids for row in rows] == [[1, 2], [1, 2, 3, 4]]


def padded_tokens(lengths: list[int], cut: list[list[int]]) -> int:
    return sum(len(batch) * max(lengths[index] for index in batch) + merge_rows.PASS_TOKENS for batch in cut)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(0, 500))
def test_the_baseline_is_packed_as_well_as_can_be(lengths, budget):
    cut = micro_batches(lengths, budget)
    assert sorted(index for batch in cut for index in batch) == list(range(len(lengths)))
    for batch in cut:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= budget
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    best = min(
        padded_tokens(lengths, parts)
        for places in itertools.product([False, True], repeat=len(order) - 1)
        for parts in [split(order, places)]
        if all(len(part) == 1 or len(part) * lengths[part[-1]] <= budget for part in parts)
    )
    assert padded_tokens(lengths, cut) == best


def split(order: list[int], places: tuple[bool, ...]) -> list[list[int]]:
    parts = [[order[0]]]
    for index, is_cut in zip(order[1:], places, strict=True):
        if is_cut:
            parts.append([index])
        else:
            parts[-1].append(index)
    return parts


def test_without_a_budget_rows_are_trained_one_by_one():
    assert micro_batches([5, 3, 4], 0) == [[1], [2], [0]]

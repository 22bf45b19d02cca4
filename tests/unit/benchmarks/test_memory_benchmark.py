"""The cases of `benchmarks/memory.py`."""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import memory

from agentjet.merging import plant


def num_tokens(case: str, members: int) -> int:
    return plant([sample for group in memory.samples_of(case, members) for sample in group]).num_tokens


def test_the_tree_has_32_thousand_unique_tokens_and_the_row_is_its_longest():
    tree, row = num_tokens("tree", 26), num_tokens("row", 26)
    assert 32_768 <= tree <= 34_000
    assert 26 * (row - 800) < tree < 26 * row


def test_a_case_says_what_it_computed_within_which_peak():
    torch.set_num_threads(1)
    args = argparse.Namespace(model="tiny", members=2, activation_gib=0.01, threads=1)
    found = memory.child("tree", args)
    assert found["tokens"] == num_tokens("tree", 2)
    assert found["peak_bytes"] > 2**27
    assert 0.6 < found["bound_share"] <= 0.75
    assert found["grad_norm"] > 0

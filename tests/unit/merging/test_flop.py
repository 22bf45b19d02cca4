"""The cost model against counts by hand and against PyTorch's own counter."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from made_sample import sample_of_rows
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from agentjet.merging import plant
from agentjet.merging.flop import (
    ModelShape,
    Workload,
    flop_ratio,
    forest_workload,
    row_workload,
    step_flops,
    unmerged_workload,
)

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=8,
    intermediate_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=50,
    windows=(0, 3),
)


def test_a_row_costs_what_a_count_by_hand_gives():
    work = row_workload(SHAPE, [5], num_scored=2)
    assert work == Workload(num_tokens=5, num_rows=2, num_pairs={0: 15, 3: 12})
    flops = step_flops(SHAPE, work)
    weights = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16
    assert flops.linear == 3 * 2 * 5 * 2 * weights
    assert flops.attention == 3 * 4 * (15 + 12) * 8
    assert flops.head == 3 * 2 * 2 * 8 * 50
    assert flops.total == flops.linear + flops.attention + flops.head


def test_a_chain_merges_into_its_longest_row():
    rows = [([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7])]
    sample = sample_of_rows(rows)
    forest = plant([sample])
    assert unmerged_workload(SHAPE, [sample], forest) == row_workload(SHAPE, [5, 7], 3)
    assert forest_workload(SHAPE, forest) == row_workload(SHAPE, [7], 3)


def test_equal_replies_share_their_rows():
    sample = sample_of_rows([([1, 2], [3, 4]), ([1, 2], [3, 4]), ([1, 2], [3, 9])])
    forest = plant([sample])
    assert forest_workload(SHAPE, forest).num_rows == 2
    assert forest_workload(SHAPE, forest).num_tokens == 5


Rows = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.lists(st.integers(0, 2), min_size=1, max_size=4)),
    min_size=1,
    max_size=6,
)


@given(Rows)
def test_a_forest_never_costs_more_than_its_rows(rows):
    sample = sample_of_rows(rows)
    forest = plant([sample])
    unmerged, merged = unmerged_workload(SHAPE, [sample], forest), forest_workload(SHAPE, forest)
    assert flop_ratio(SHAPE, unmerged, merged) >= 1
    lengths = np.array([len(prompt) + len(completion) for prompt, completion in rows])
    assert unmerged == row_workload(SHAPE, lengths, sum(len(completion) for _, completion in rows))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_workloads_add_up(left, right):
    both = row_workload(SHAPE, left, 1) + row_workload(SHAPE, right, 2)
    assert both == row_workload(SHAPE, left + right, 3)


def test_the_count_is_that_of_pytorch():
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    shape = ModelShape.of(config)
    assert shape.windows == (0, 0)
    model = LlamaForCausalLM(config)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(7)[None], use_cache=False).logits.sum().backward()
    counted = counter.get_total_flops()
    # An eager mask computes all 49 pairs.
    work = Workload(num_tokens=7, num_rows=7, num_pairs={0: 49})
    assert counted == step_flops(shape, work).total


@pytest.mark.parametrize(
    ("name", "fields", "windows"),
    [
        ("MistralConfig", {"sliding_window": 7}, (7, 7)),
        ("MistralConfig", {"sliding_window": None}, (0, 0)),
        ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, (0, 5)),
        ("Qwen3Config", {}, (0, 0)),
        ("Gemma2Config", {"sliding_window": 4}, (4, 0)),
    ],
)
def test_windows_are_read_layer_by_layer(name, fields, windows):
    config = getattr(transformers, name)(num_hidden_layers=2, **fields)
    assert ModelShape.of(config).windows == windows

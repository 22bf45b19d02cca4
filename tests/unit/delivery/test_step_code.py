"""Entropy-coded steps: back again exactly, near the entropy, and no misreading of what is damaged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.delivery.rans import Frequencies
from agentjet.delivery.step_code import decode_steps, encode_steps

STEPS = st.integers(-(2**32), 2**32).filter(bool) | st.integers(-3, 3).filter(bool)


@given(st.lists(st.tuples(STEPS, st.integers(0, 4)), max_size=200))
def test_steps_come_back(rows: list[tuple[int, int]]):
    steps = np.array([step for step, _ in rows], np.int64)
    contexts = np.array([context for _, context in rows], np.uint8)
    assert decode_steps(encode_steps(steps, contexts, 5), contexts, 5).tolist() == steps.tolist()


@pytest.mark.parametrize("number", [5_000, 2_000_000])
def test_symbols_of_any_number_of_lanes_cost_their_entropy(number: int):
    rng = np.random.default_rng(0)
    contexts = rng.integers(0, 2, number).astype(np.uint8)
    symbols = np.where(contexts, rng.geometric(0.5, number), rng.geometric(0.99, number)).clip(0, 15).astype(np.uint8)
    table = Frequencies.count(symbols, contexts, (2, 16))
    stream = table.encode(symbols, contexts)
    counts = np.stack([np.bincount(symbols[contexts == one], minlength=16) for one in (0, 1)])
    shares = counts / counts.sum(1, keepdims=True)
    entropy_bytes = -(counts * np.log2(shares, out=np.zeros_like(shares), where=shares > 0)).sum() / 8
    assert len(stream) < entropy_bytes * 1.005 + 4 * min(4096, max(1, number // 1024))
    assert np.array_equal(table.decode(stream, contexts), symbols)


def test_a_stream_of_another_length_is_refused():
    steps, contexts = np.arange(1, 3000), np.zeros(2999, np.uint8)
    table, stream, low_bits = encode_steps(steps, contexts, 1)
    for sections in ([table, stream[:-2], low_bits], [table, stream + b"ab", low_bits], [table, stream, low_bits[:-1]]):
        with pytest.raises(ValueError, match=r"stream of symbols|low bits"):
            decode_steps(sections, contexts, 1)
    with pytest.raises(ValueError, match="stream of symbols"):
        decode_steps([table, stream, low_bits], contexts[1:], 1)


def test_frequencies_have_to_sum_up():
    with pytest.raises(ValueError, match="2\\^14"):
        Frequencies(np.full((1, 4), 3, np.uint16))

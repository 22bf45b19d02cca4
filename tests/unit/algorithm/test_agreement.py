import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentjet.algorithm.agreement import FARTHEST_NATS, agreement

GAPS = st.lists(st.floats(-3, 3), min_size=1, max_size=2000)


def test_figures_of_a_few_differences():
    found = agreement(torch.tensor([-1.0, -2.0, -0.5, -3.0]), torch.tensor([-1.0, -2.1, -1.5, -2.2]))
    assert found.num_tokens == 4
    assert found.mean_nats == pytest.approx((0.1 + 1.0 + 0.8) / 4, abs=1e-6)
    assert found.max_nats == found.p999_nats == pytest.approx(1.0)
    k3 = [math.exp(gap) - 1 - gap for gap in (0.0, 0.1, 1.0, -0.8)]
    assert found.k3_nats == pytest.approx(sum(k3) / 4, abs=1e-6)
    assert found.outside_ratio == 0.5


@given(GAPS)
def test_figures_are_ordered_and_k3_is_never_negative(gaps):
    found = agreement(torch.tensor(gaps, dtype=torch.float64), torch.zeros(len(gaps), dtype=torch.float64))
    assert 0 <= found.mean_nats <= found.max_nats + 1e-12
    assert found.p999_nats <= found.max_nats
    assert sum(abs(gap) <= found.p999_nats for gap in gaps) >= 0.999 * len(gaps)
    assert found.k3_nats >= 0
    assert 0 <= found.outside_ratio <= 1


def test_one_of_two_thousand_is_above_the_999th_permille():
    gaps = torch.full((2000,), 0.01)
    gaps[7] = 5.0
    found = agreement(gaps, torch.zeros(2000))
    assert (found.p999_nats, found.max_nats) == (pytest.approx(0.01), 5.0)


@pytest.mark.parametrize("broken", [math.nan, -math.inf, math.inf])
def test_what_is_no_number_is_as_far_as_can_be_and_every_figure_stays_finite(broken):
    found = agreement(torch.tensor([broken, -1.0]), torch.tensor([-1.0, -1.0]))
    assert found.max_nats == FARTHEST_NATS
    assert all(math.isfinite(value) for value in found.figures().values())

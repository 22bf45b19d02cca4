import math

import pytest
import torch

from agentjet.algorithm.correction import correction_weight, is_accepted
from agentjet.algorithm.ratio import sequence_mean, sequence_sum
from agentjet.config import AlgorithmSettings


def settings(**fields: object) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(fields)


def terms(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


TWO_AND_ONE = torch.tensor([0, 0, 1])


def test_sums_and_means_stay_within_their_sequences():
    values = terms(1.0, 3.0, 5.0)
    assert sequence_sum(values, TWO_AND_ONE).tolist() == [4.0, 4.0, 5.0]
    assert sequence_mean(values, TWO_AND_ONE).tolist() == [2.0, 2.0, 5.0]
    nothing = torch.zeros(0, dtype=torch.long)
    assert sequence_mean(terms(), nothing).tolist() == []


def test_r15_truncated_and_banded_weights_are_detached():
    proximal, sampler = terms(math.log(6.0), math.log(0.3), 0.0, grad=True), terms(0.0, 0.0, 0.0)
    tis = correction_weight(proximal, sampler, TWO_AND_ONE, settings(correction="tis", correction_cap=2))
    band = settings(correction="icepop", correction_cap=5, correction_floor=0.5)
    pop = correction_weight(proximal, sampler, TWO_AND_ONE, band)
    assert tis.tolist() == pytest.approx([2.0, 0.3, 1.0])
    assert pop.tolist() == pytest.approx([0.0, 0.0, 1.0])
    assert not tis.requires_grad
    assert not pop.requires_grad
    assert correction_weight(proximal, sampler, TWO_AND_ONE, settings(correction="none")).tolist() == [1.0] * 3


def test_a_sequence_weight_is_the_truncated_product_of_its_ratios():
    proximal, sampler = terms(math.log(3.0), math.log(0.5), math.log(9.0)), terms(0.0, 0.0, 0.0)
    found = correction_weight(proximal, sampler, TWO_AND_ONE, settings(correction="sequence_tis", correction_cap=2))
    assert found.tolist() == pytest.approx([1.5, 1.5, 2.0])


def test_a_product_too_large_for_a_float_is_truncated_all_the_same():
    proximal, sampler = terms(*[5.0] * 200), terms(*[0.0] * 200)
    one = torch.zeros(200, dtype=torch.long)
    assert correction_weight(proximal, sampler, one, settings(correction="sequence_tis")).tolist() == [2.0] * 200
    assert not is_accepted(proximal, sampler, one, settings(rejection="sequence")).any()


def test_rejection_by_the_product_grows_stricter_with_length_and_by_the_mean_does_not():
    log = [0.005] * 300
    one = torch.zeros(300, dtype=torch.long)
    by_product = is_accepted(terms(*log), terms(*[0.0] * 300), one, settings(rejection="sequence"))
    by_mean = is_accepted(terms(*log), terms(*[0.0] * 300), one, settings(rejection="geometric"))
    assert not by_product.any()
    assert by_mean.all()


@pytest.mark.parametrize("ratio", [0.4, 2.5])
def test_only_the_sequence_outside_the_band_is_rejected(ratio):
    proximal = terms(math.log(ratio), math.log(ratio), 0.0)
    for rejection in ("sequence", "geometric"):
        found = is_accepted(proximal, terms(0.0, 0.0, 0.0), TWO_AND_ONE, settings(rejection=rejection))
        assert found.tolist() == [False, False, True]
    assert is_accepted(proximal, terms(0.0, 0.0, 0.0), TWO_AND_ONE, settings()).all()


def test_a_broken_policy_is_not_mistaken_for_a_rejected_one():
    for rejection in ("sequence", "geometric"):
        assert is_accepted(terms(math.nan), terms(0.0), torch.tensor([0]), settings(rejection=rejection)).all()


@pytest.mark.parametrize("correction", ["none", "tis", "icepop", "sequence_tis"])
def test_a_sampler_that_is_not_a_number_is_refused_whatever_the_correction(correction):
    with pytest.raises(ValueError, match="NaN"):
        correction_weight(terms(0.0), terms(math.nan), torch.tensor([0]), settings(correction=correction))

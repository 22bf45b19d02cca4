import math

import pytest
import torch

from agentjet.algorithm.loss import correction_weight, is_clipped, log_ratio, policy_loss
from agentjet.algorithm.metric import TermSums, k3, sum_terms
from agentjet.config import AlgorithmSettings


def settings(**fields: object) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(fields)


def terms(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def test_l5_nan_outside_the_mask_reaches_neither_value_nor_gradient():
    logprob = terms(0.0, 0.0, grad=True)
    ratio = log_ratio(logprob, terms(0.0, math.nan), torch.tensor([True, False])).exp()
    ratio.sum().backward()
    assert ratio.tolist() == [1.0, 1.0]
    assert logprob.grad is not None
    assert logprob.grad.tolist() == [1.0, 0.0]


def test_l5_nan_under_the_mask_raises():
    with pytest.raises(ValueError, match="NaN"):
        log_ratio(terms(0.0, 0.0), terms(0.0, math.nan), torch.tensor([False, True]))


def test_r15_truncated_and_banded_weights_are_detached():
    proximal, sampler = terms(math.log(6.0), math.log(0.3), 0.0, grad=True), terms(0.0, 0.0, 0.0)
    tis = correction_weight(proximal, sampler, settings(correction="tis", correction_cap=2))
    pop = correction_weight(proximal, sampler, settings(correction="icepop", correction_cap=5, correction_floor=0.5))
    assert tis.tolist() == pytest.approx([2.0, 0.3, 1.0])
    assert pop.tolist() == pytest.approx([0.0, 0.0, 1.0])
    assert not tis.requires_grad
    assert not pop.requires_grad
    assert correction_weight(proximal, sampler, settings(correction="none")).tolist() == [1.0] * 3


def test_r16_dual_clip_caps_the_loss_of_a_negative_advantage():
    logprob = terms(math.log(10.0), grad=True)
    loss = policy_loss(logprob, terms(0.0), terms(-2.0), settings(dual_clip=3))
    assert loss.item() == pytest.approx(3 * 2.0)
    loss.sum().backward()
    assert logprob.grad is not None
    assert logprob.grad.item() == 0.0
    assert policy_loss(logprob, terms(0.0), terms(-2.0), settings(dual_clip=0)).item() == pytest.approx(20.0)


def test_ppo_clips_each_side_by_its_own_bound():
    ratios, advantages = [1.5, 0.5, 1.5, 0.5], terms(1.0, 1.0, -1.0, -1.0)
    chosen = settings(clip_low=0.1, clip_high=0.3)
    logprob = terms(*map(math.log, ratios))
    assert policy_loss(logprob, terms(0, 0, 0, 0), advantages, chosen).tolist() == pytest.approx([-1.3, -0.5, 1.5, 0.9])
    assert is_clipped(logprob, terms(0, 0, 0, 0), advantages, chosen).tolist() == [True, False, False, True]


def test_reinforce_and_on_policy_ppo_have_the_same_gradient():
    gradients = []
    for loss in ("reinforce", "ppo"):
        logprob = terms(-0.3, -2.0, grad=True)
        policy_loss(logprob, logprob.detach(), terms(0.7, -1.1), settings(loss=loss)).sum().backward()
        gradients.append(logprob.grad)
    assert torch.equal(gradients[0], gradients[1])


def test_k3_is_zero_on_policy_and_never_negative():
    assert k3(terms(0.0)).item() == 0.0
    assert (k3(torch.linspace(-3, 3, 50)) >= 0).all()
    assert k3(terms(math.log(2.0))).item() == pytest.approx(1 - math.log(2.0))


def test_figures_add_up_over_any_split():
    torch.manual_seed(0)
    logprob, proximal, sampler, loss = torch.randn(4, 10).double()
    fields = {"proximal": proximal, "sampler": sampler, "loss": loss, "is_cut": loss > 0, "entropy": -logprob}
    fields["correction"] = torch.rand(10)
    whole = sum_terms(logprob, **fields)
    parts = TermSums()
    for part in (slice(0, 3), slice(3, 3), slice(3, 10)):
        parts.add(sum_terms(logprob[part], **{name: value[part] for name, value in fields.items()}))
    assert parts.means() == pytest.approx(whole.means())
    assert whole.means()["ratio_max"] == pytest.approx((logprob - proximal).exp().max().item())
    assert TermSums().means() == {}

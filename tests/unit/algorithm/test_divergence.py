"""Row R14, in expectation over both tokens of pi = (.8, .2); the gradient is that of the logit of the first token."""

import math

import pytest
import torch

from agentjet.algorithm.divergence import divergence_loss, k3
from agentjet.config import AlgorithmSettings

REVERSE_KL, REVERSE_GRADIENT, FORWARD_GRADIENT = 0.192745, 0.221807, 0.3


def settings(kl: str) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate({"kl": kl, "kl_coefficient": 1.0})


def policy(logit: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)])


def expected(kl: str, *, drawn: torch.Tensor | None = None) -> tuple[float, float]:
    """Value and gradient over tokens that `drawn` (pi itself, if None) draws and that are weighted back to it."""
    logit = torch.tensor(math.log(4.0), dtype=torch.float64, requires_grad=True)
    logprob, reference = policy(logit), torch.full((2,), math.log(0.5), dtype=torch.float64)
    proximal = logprob.detach() if drawn is None else drawn
    loss = (proximal.exp() * divergence_loss(logprob, proximal, reference, settings(kl))).sum()
    (gradient,) = torch.autograd.grad(loss, logit)
    return loss.item(), gradient.item()


def test_r14_importance_weighted_k3_has_value_and_gradient_of_the_reverse_kl():
    value, gradient = expected("k3")
    assert value == pytest.approx(REVERSE_KL, abs=1e-6)
    assert gradient == pytest.approx(REVERSE_GRADIENT, abs=1e-6)


def test_r14_k2_has_the_gradient_of_the_reverse_kl():
    assert expected("k2")[1] == pytest.approx(REVERSE_GRADIENT, abs=1e-6)


@pytest.mark.parametrize("kl", ["k2", "k3"])
def test_r14_the_gradient_stays_exact_when_an_older_policy_drew_the_tokens(kl):
    drawn = torch.tensor([math.log(0.6), math.log(0.4)], dtype=torch.float64)
    assert expected(kl, drawn=drawn)[1] == pytest.approx(REVERSE_GRADIENT, abs=1e-6)


def test_r14_what_the_other_estimators_would_give_as_a_loss():
    logit = torch.tensor(math.log(4.0), dtype=torch.float64, requires_grad=True)
    logprob, half = policy(logit), math.log(0.5)
    draws = logprob.detach().exp()
    (k1_gradient,) = torch.autograd.grad((draws * (logprob - half)).sum(), logit, retain_graph=True)
    (k3_gradient,) = torch.autograd.grad((draws * k3(half - logprob)).sum(), logit)
    assert k1_gradient.item() == pytest.approx(0.0, abs=1e-12)
    assert k3_gradient.item() == pytest.approx(FORWARD_GRADIENT, abs=1e-6)
    assert (draws * (logprob - half)).sum().item() == pytest.approx(REVERSE_KL, abs=1e-6)


def test_the_gradient_of_the_weighted_k3_agrees_with_finite_differences():
    torch.manual_seed(0)
    logprob, proximal, reference = (-torch.rand(3, 5, dtype=torch.float64)).unbind()
    logprob.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: divergence_loss(x, proximal, reference, settings("k3")), logprob)


def test_k3_is_zero_on_policy_and_never_negative():
    assert k3(torch.tensor(0.0)).item() == 0.0
    assert (k3(torch.linspace(-3, 3, 50)) >= 0).all()
    assert k3(torch.tensor(math.log(2.0))).item() == pytest.approx(1 - math.log(2.0), abs=1e-6)

import math

import pytest
import torch

from agentjet.algorithm.loss import is_clipped, policy_loss
from agentjet.algorithm.metric import TermSums, sum_terms
from agentjet.config import AlgorithmSettings


def settings(**fields: object) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(fields)


def terms(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def whole(length: int) -> torch.Tensor:
    """All terms in one sequence."""
    return torch.zeros(length, dtype=torch.long)


WIDE_GSPO = settings(loss="gspo", aggregation="sequence_mean", clip_low=0.9, clip_high=0.9)


def test_r16_dual_clip_caps_the_loss_of_a_negative_advantage():
    logprob = terms(math.log(10.0), grad=True)
    loss = policy_loss(logprob, terms(0.0), terms(-2.0), whole(1), settings(dual_clip=3))
    assert loss.item() == pytest.approx(3 * 2.0)
    loss.sum().backward()
    assert logprob.grad is not None
    assert logprob.grad.item() == 0.0
    assert policy_loss(logprob, terms(0.0), terms(-2.0), whole(1), settings(dual_clip=0)).item() == pytest.approx(20.0)


def test_ppo_clips_each_side_by_its_own_bound():
    ratios, advantages = [1.5, 0.5, 1.5, 0.5], terms(1.0, 1.0, -1.0, -1.0)
    chosen = settings(clip_low=0.1, clip_high=0.3)
    logprob = terms(*map(math.log, ratios))
    assert policy_loss(logprob, terms(0, 0, 0, 0), advantages, whole(4), chosen).tolist() == pytest.approx(
        [-1.3, -0.5, 1.5, 0.9]
    )
    assert is_clipped(logprob, terms(0, 0, 0, 0), advantages, whole(4), chosen).tolist() == [True, False, False, True]


def test_l6_a_sequence_ratio_is_the_geometric_mean_of_its_terms():
    logprob = torch.full((300,), 0.005, dtype=torch.float64)
    loss = policy_loss(logprob, terms(*[0.0] * 300), terms(*[1.0] * 300), whole(300), WIDE_GSPO)
    assert loss.tolist() == pytest.approx([-1.00501] * 300, abs=1e-5)


def test_l11_what_a_sequence_is_decides_the_ratio():
    logprob = terms(*[0.1] * 2, *[0.0] * 8)
    nothing, ones = torch.zeros_like(logprob), torch.ones_like(logprob)
    by_call = -policy_loss(logprob, nothing, ones, torch.tensor([0] * 2 + [1] * 8), WIDE_GSPO)
    by_episode = -policy_loss(logprob, nothing, ones, whole(10), WIDE_GSPO)
    assert by_call.tolist() == pytest.approx([1.10517] * 2 + [1.0] * 8, abs=1e-5)
    assert by_episode.tolist() == pytest.approx([1.02020] * 10, abs=1e-5)


def test_gspo_clips_whole_sequences():
    chosen = settings(loss="gspo", aggregation="sequence_mean", clip_low=0.1, clip_high=0.1)
    logprob = terms(0.4, 0.0, 0.05, 0.0, grad=True)
    arguments = (terms(0, 0, 0, 0), terms(1.0, 1.0, 1.0, 1.0), torch.tensor([0, 0, 1, 1]), chosen)
    policy_loss(logprob, *arguments).sum().backward()
    assert logprob.grad is not None
    assert logprob.grad[:2].tolist() == [0.0, 0.0]
    assert logprob.grad[2:].tolist() == pytest.approx([-math.exp(0.025)] * 2)
    assert is_clipped(logprob, *arguments).tolist() == [True, True, False, False]


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    chosen = settings(loss="cispo", clip_low=1.0, clip_high=4.0)
    logprob = terms(math.log(0.5), math.log(9.0), grad=True)
    arguments = (terms(0, 0), terms(1.0, -1.0), whole(2), chosen)
    policy_loss(logprob, *arguments).sum().backward()
    assert logprob.grad is not None
    assert logprob.grad.tolist() == pytest.approx([-0.5, 5.0])
    assert is_clipped(logprob, *arguments).tolist() == [False, True]


def test_sapo_gates_smoothly_and_more_narrowly_where_the_advantage_is_negative():
    slope: dict[float, float] = {}
    for advantage in (1.0, -1.0):
        logprob = terms(math.log(3.0), grad=True)
        policy_loss(logprob, terms(0.0), terms(advantage), whole(1), settings(loss="sapo")).sum().backward()
        assert logprob.grad is not None
        slope[advantage] = abs(logprob.grad.item())

    def gate(temperature: float, ratio: float) -> float:
        weight = 1 / (1 + math.exp(-temperature * (ratio - 1)))
        return 4 * weight * (1 - weight) * ratio

    assert slope[1.0] == pytest.approx(gate(1.0, 3.0))
    assert slope[-1.0] == pytest.approx(gate(1.05, 3.0))
    assert slope[-1.0] < slope[1.0]


@pytest.mark.parametrize("loss", ["reinforce", "ppo", "gspo", "cispo", "sapo"])
def test_on_policy_every_loss_has_the_gradient_of_reinforce(loss):
    logprob = terms(-0.3, -2.0, -0.7, grad=True)
    chosen = settings(loss=loss, aggregation="sequence_mean")
    policy_loss(logprob, logprob.detach(), terms(0.7, -1.1, 0.2), whole(3), chosen).sum().backward()
    assert logprob.grad is not None
    assert logprob.grad.tolist() == pytest.approx([-0.7, 1.1, -0.2])


@pytest.mark.parametrize("loss", ["reinforce", "ppo", "gspo", "cispo", "sapo"])
def test_gradients_agree_with_finite_differences(loss):
    """Sequences of equal terms, as every aggregation gives them; `cispo` with its weight held still."""
    torch.manual_seed(1)
    sequence = torch.tensor([0] * 4 + [1] * 3 + [2] * 5)
    proximal = -torch.rand(12, dtype=torch.float64) * 3
    logprob = (proximal + 0.3 * torch.randn(12, dtype=torch.float64)).requires_grad_()
    advantage = terms(0.8, -1.3, 0.4)[sequence]
    chosen = settings(loss=loss, aggregation="sequence_mean")
    weights = (logprob.detach() - proximal).exp().clamp(1 - chosen.clip_low, 1 + chosen.clip_high)

    def total(x: torch.Tensor) -> torch.Tensor:
        if loss == "cispo":
            return (-advantage * weights * x).sum()
        return policy_loss(x, proximal, advantage, sequence, chosen).sum()

    (ours,) = torch.autograd.grad(policy_loss(logprob, proximal, advantage, sequence, chosen).sum(), logprob)
    step = 1e-6
    numeric = [
        (total(logprob.detach() + step * one) - total(logprob.detach() - step * one)) / (2 * step)
        for one in torch.eye(12, dtype=torch.float64)
    ]
    torch.testing.assert_close(ours, torch.stack(numeric), rtol=1e-6, atol=1e-8)


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

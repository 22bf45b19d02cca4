"""Divergence from a frozen reference, estimated on the terms that were sampled.

With r = reference / pi on tokens that pi drew: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r (Schulman 2020,
"Approximating KL divergence"). k1 belongs into the reward: as a loss its expected gradient is 0.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from agentjet.algorithm.ratio import Terms
from agentjet.config import AlgorithmSettings


def divergence_loss(logprob: Terms, proximal: Terms, reference: Terms, settings: AlgorithmSettings) -> Terms:
    """Estimate of KL(pi || reference) at each term, before coefficient, correction and weight.

    Both have, in expectation over tokens of the proximal policy, the gradient of KL(pi || reference) itself:

    - `k2`: weighted by pi / proximal without gradient; d k2 = log(pi / reference) d log pi is that of the reverse KL.
    - `k3`: weighted by pi / proximal with gradient (DeepSeek-V3.2, arXiv:2512.02556: the unbiased estimate).
      Unweighted, its gradient would be that of the forward KL.
    """
    ratio = (logprob - proximal.detach()).exp()
    gap = reference - logprob
    if settings.kl == "k2":
        return ratio.detach() * gap.square() / 2
    return ratio * k3(gap)


def k3(gap: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """r - 1 - log r with r = exp(gap): an estimate of KL(p || q) on tokens of p, where gap = log q - log p."""
    return torch.expm1(gap) - gap

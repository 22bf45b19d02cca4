"""Losses of single terms: a term is one sampled token, all tensors are aligned by term.

Invariant: where pi is the proximal policy, every loss has the gradient of -A * log pi; losses differ in how they keep
pi near it.

It does not know episodes, weights of terms (`agentjet.algorithm.aggregation`) or the sampler (`correction`).
"""

import torch
from jaxtyping import Bool
from torch import Tensor

from agentjet.algorithm.ratio import Sequences, Terms, sequence_mean
from agentjet.config import AlgorithmSettings


def policy_loss(
    logprob: Terms, proximal: Terms, advantage: Terms, sequence: Sequences, settings: AlgorithmSettings
) -> Terms:
    """Loss of each term before correction and weight; r = pi / proximal.

    - `reinforce`: -A * log pi.
    - `ppo`: -min(r A, clip(r, 1 - low, 1 + high) A) (arXiv:1707.06347, equation 7); for A < 0 at most -c A, the dual
      clip (arXiv:1912.09729, equation 5).
    - `gspo`: as `ppo` without dual clip, with r the geometric mean of the sequence's ratios (arXiv:2507.18071, equation
      7). Its gradient reaches each term through that term alone (the paper's GSPO-token): terms may differ in A.
    - `cispo`: -clip(r, 1 - low, 1 + high) A log pi, the clipped ratio without gradient (arXiv:2506.13585, equation 4).
    - `sapo`: -A sigmoid(t (r - 1)) 4 / t, with a temperature t for A > 0 and one for the rest (arXiv:2511.20347).

    Args:
        logprob: Log-probs of pi, with gradient.
        proximal: Log-probs that the ratio refers to.
        advantage: Of each term.
        sequence: Sequence of each term.
        settings: `loss` and its bounds.
    """
    if settings.loss == "reinforce":
        return -advantage * logprob
    ratio = _ratio(logprob, proximal.detach(), sequence, settings)
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    match settings.loss:
        case "cispo":
            return -advantage * clipped.detach() * logprob
        case "sapo":
            positive, negative = (ratio.new_tensor(t) for t in (settings.sapo_positive, settings.sapo_negative))
            temperature = torch.where(advantage > 0, positive, negative)
            return -advantage * torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
        case _:
            loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    if settings.loss == "ppo" and settings.dual_clip > 0:
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * settings.dual_clip), loss)
    return loss


@torch.no_grad()
def is_clipped(
    logprob: Terms, proximal: Terms, advantage: Terms, sequence: Sequences, settings: AlgorithmSettings
) -> Bool[Tensor, " terms"]:
    """Terms whose gradient the clip cut off or, for `cispo`, whose ratio it changed."""
    if settings.loss in {"reinforce", "sapo"}:
        return torch.zeros_like(advantage, dtype=torch.bool)
    ratio = _ratio(logprob, proximal, sequence, settings)
    is_high, is_low = ratio > 1 + settings.clip_high, ratio < 1 - settings.clip_low
    if settings.loss == "cispo":
        return is_high | is_low
    is_cut = ((advantage > 0) & is_high) | ((advantage < 0) & is_low)
    if settings.loss == "ppo" and settings.dual_clip > 0:
        is_cut = is_cut | ((advantage < 0) & (ratio > settings.dual_clip))
    return is_cut


def _ratio(logprob: Terms, proximal: Terms, sequence: Sequences, settings: AlgorithmSettings) -> Terms:
    log = logprob - proximal
    if settings.loss != "gspo":
        return log.exp()
    # The value of the sequence, the gradient of the term.
    return (sequence_mean(log.detach(), sequence) + logprob - logprob.detach()).exp()

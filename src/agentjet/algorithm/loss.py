"""Losses of single terms: a term is one sampled token, all tensors are aligned by term.

Invariants: log-probs are float32 (or wider); a term outside the mask is selected away before any arithmetic, so that
whatever stands there can reach neither value nor gradient; corrections carry no gradient.

It does not know episodes or weights of terms (`agentjet.algorithm.aggregation`).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from agentjet.config import AlgorithmSettings

Terms = Float[Tensor, " terms"]


def log_ratio(logprob: Terms, reference: Terms, mask: Bool[Tensor, " terms"] | None = None) -> Terms:
    """log(pi / reference) of each term, 0 outside the mask.

    Raises ValueError when a value under the mask is not a number: a broken sampler must not be averaged away.
    """
    if mask is not None:
        logprob = torch.where(mask, logprob, torch.zeros_like(logprob))
        reference = torch.where(mask, reference, torch.zeros_like(reference))
    if torch.isnan(reference).any():
        raise ValueError("a trained term's reference log-prob is NaN: its call should not have been merged")
    return logprob - reference


def correction_weight(proximal: Terms, sampler: Terms, settings: AlgorithmSettings) -> Terms:
    """Weight for the sampler's distance to the proximal policy; no gradient.

    - `tis`: min(proximal / sampler, cap), truncated importance sampling (Yao et al. 2025, "Your efficient RL framework
      secretly brings you off-policy RL training").
    - `icepop`: the ratio inside [floor, cap], else 0 (Ling Team 2025, arXiv:2510.18855).
    """
    if settings.correction == "none":
        return torch.ones_like(proximal)
    ratio = log_ratio(proximal.detach(), sampler.detach()).exp()
    if settings.correction == "tis":
        return ratio.clamp(max=settings.correction_cap)
    is_inside = (ratio >= settings.correction_floor) & (ratio <= settings.correction_cap)
    return torch.where(is_inside, ratio, torch.zeros_like(ratio))


def policy_loss(logprob: Terms, proximal: Terms, advantage: Terms, settings: AlgorithmSettings) -> Terms:
    """Loss of each term before correction and weight.

    - `reinforce`: -A * log pi.
    - `ppo`: -min(r A, clip(r, 1 - low, 1 + high) A) with r = pi / proximal (arXiv:1707.06347, equation 7); for A < 0 at
      most -c A, the dual clip (arXiv:1912.09729, equation 5).
    """
    if settings.loss == "reinforce":
        return -advantage * logprob
    ratio = (logprob - proximal.detach()).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    if settings.dual_clip > 0:
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * settings.dual_clip), loss)
    return loss


def is_clipped(
    logprob: Terms, proximal: Terms, advantage: Terms, settings: AlgorithmSettings
) -> Bool[Tensor, " terms"]:
    """Terms whose gradient the clip cut off."""
    ratio = (logprob - proximal).exp()
    is_cut = ((advantage > 0) & (ratio > 1 + settings.clip_high)) | ((advantage < 0) & (ratio < 1 - settings.clip_low))
    if settings.dual_clip > 0:
        is_cut = is_cut | ((advantage < 0) & (ratio > settings.dual_clip))
    return is_cut & (settings.loss == "ppo")

"""Corrections for a sampler that is not quite the policy: weights of terms, and sequences to leave out.

Engine and learner compute the same weights with different kernels, and a sampler may be some steps old. What these
functions compare is the proximal policy (the learner's, at the batch's start) with the sampler's recorded log-probs.

Invariant: nothing here carries a gradient.
"""

import torch
from jaxtyping import Bool
from torch import Tensor

from agentjet.algorithm.ratio import Sequences, Terms, log_ratio, sequence_mean, sequence_sum
from agentjet.config import AlgorithmSettings


@torch.no_grad()
def correction_weight(proximal: Terms, sampler: Terms, sequence: Sequences, settings: AlgorithmSettings) -> Terms:
    """Weight of each term's loss for the sampler's distance to the proximal policy.

    - `tis`: min(proximal / sampler, cap), truncated importance sampling (Yao et al. 2025, "Your efficient RL framework
      secretly brings you off-policy RL training").
    - `icepop`: the ratio inside [floor, cap], else 0 (Ling Team 2025, arXiv:2510.18855).
    - `sequence_tis`: min(product of the sequence's ratios, cap), the same for each of its terms (Liu, Li et al. 2025,
      "When speed kills stability: demystifying RL collapse from the training-inference mismatch").

    Args:
        proximal: Log-probs of the policy that is corrected to.
        sampler: Log-probs of the policy that drew.
        sequence: Sequence of each term.
        settings: `correction` and its bounds.
    """
    log = log_ratio(proximal, sampler)
    match settings.correction:
        case "none":
            return torch.ones_like(proximal)
        case "tis":
            return log.exp().clamp(max=settings.correction_cap)
        case "icepop":
            ratio = log.exp()
            is_inside = (ratio >= settings.correction_floor) & (ratio <= settings.correction_cap)
            return torch.where(is_inside, ratio, torch.zeros_like(ratio))
        case "sequence_tis":
            return sequence_sum(log, sequence).exp().clamp(max=settings.correction_cap)


@torch.no_grad()
def is_accepted(
    proximal: Terms, sampler: Terms, sequence: Sequences, settings: AlgorithmSettings
) -> Bool[Tensor, " terms"]:
    """Terms whose sequence the proximal policy could have drawn; the ratio proximal / sampler has to lie in the band.

    Sources: Liu, Li et al. 2025 (as above), masked importance sampling by sequences and geometric rejection.

    - `sequence`: the product of the sequence's ratios.
    - `geometric`: their geometric mean, which does not depend on the sequence's length.
    """
    log = log_ratio(proximal, sampler)
    match settings.rejection:
        case "none":
            return torch.ones_like(log, dtype=torch.bool)
        case "sequence":
            ratio = sequence_sum(log, sequence).exp()
        case "geometric":
            ratio = sequence_mean(log, sequence).exp()
    # A ratio that is not a number passes: it has to end in a gradient that is seen and skipped, not in silence.
    return ~((ratio < settings.rejection_floor) | (ratio > settings.rejection_cap))

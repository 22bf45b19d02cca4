"""How far two readings of the same log-probs lie apart: an engine's and the learner's, under the same weights.

Invariant: where both compute the same policy all of this is rounding; the policy's own movement is never in it, because
only tokens of the weights at hand are compared. It does not know engines or how log-probs are computed.
"""

import math
from dataclasses import dataclass

import torch

from agentjet.algorithm.divergence import k3
from agentjet.algorithm.ratio import Terms

RATIO_BAND = (0.5, 2.0)
"""Ratios learner / engine outside it are counted."""
FARTHEST_NATS = 100.0
"""Larger differences count as this one, so that every figure is finite."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Differences in nats, over at least one token."""

    num_tokens: int
    mean_nats: float
    """Of |learner - engine|, as the next two."""
    p999_nats: float
    """At least 99.9 % of the tokens lie below or at it; the largest where there are fewer than a thousand."""
    max_nats: float
    k3_nats: float
    """KL(engine || learner), estimated by k3."""
    outside_ratio: float
    """Share of the tokens whose probabilities differ by more than a factor of two."""

    def figures(self) -> dict[str, float]:
        """As metrics."""
        return {
            "agreement_num_tokens": float(self.num_tokens),
            "agreement_mean_nats": self.mean_nats,
            "agreement_p999_nats": self.p999_nats,
            "agreement_max_nats": self.max_nats,
            "agreement_k3_nats": self.k3_nats,
            "agreement_outside_ratio": self.outside_ratio,
        }


@torch.no_grad()
def agreement(logprob: Terms, sampled: Terms) -> Agreement:
    """The learner's log-probs beside the engine's; what is no number counts as `FARTHEST_NATS`, and passes no bound."""
    gap = (logprob - sampled).double().nan_to_num(nan=FARTHEST_NATS).clamp(-FARTHEST_NATS, FARTHEST_NATS)
    sizes, _ = gap.abs().sort()
    low, high = (math.log(edge) for edge in RATIO_BAND)
    return Agreement(
        num_tokens=len(gap),
        mean_nats=float(sizes.mean()),
        p999_nats=float(sizes[math.ceil(0.999 * len(gap)) - 1]),
        max_nats=float(sizes[-1]),
        k3_nats=float(k3(gap).mean()),
        outside_ratio=float(((gap < low) | (gap > high)).double().mean()),
    )

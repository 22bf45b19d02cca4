"""Figures of a step's terms, as sums that add up over packs and ranks and only then become means.

Invariant: a split of the terms changes no figure but by rounding.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool
from torch import Tensor

from agentjet.algorithm.divergence import k3
from agentjet.algorithm.ratio import Terms


@dataclass(slots=True)
class TermSums:
    """Sums over terms; fields named `max_` take the largest instead."""

    terms: float = 0.0
    loss: float = 0.0
    ratio: float = 0.0
    """Of pi to the proximal policy."""
    clipped: float = 0.0
    sampler_k3: float = 0.0
    """KL(sampler || pi) by k3."""
    sampler_gap: float = 0.0
    """|log pi - log-prob of the sampler|."""
    entropy: float = 0.0
    correction: float = 0.0
    reference_kl: float = 0.0
    """KL(pi || reference) by k3; 0 without a reference."""
    max_ratio: float = 0.0
    max_sampler_gap: float = 0.0

    def add(self, other: "TermSums") -> None:
        """Takes in the sums of further terms."""
        for field in fields(self):
            combine = max if field.name.startswith("max_") else float.__add__
            setattr(self, field.name, combine(getattr(self, field.name), getattr(other, field.name)))

    def means(self) -> dict[str, float]:
        """The figures for the ledger; empty without a term."""
        if not self.terms:
            return {}
        return {
            "loss": self.loss,
            "ratio_mean": self.ratio / self.terms,
            "ratio_max": self.max_ratio,
            "clip_ratio": self.clipped / self.terms,
            "sampler_k3": self.sampler_k3 / self.terms,
            "sampler_gap_mean": self.sampler_gap / self.terms,
            "sampler_gap_max": self.max_sampler_gap,
            "entropy": self.entropy / self.terms,
            "correction_mean": self.correction / self.terms,
            "reference_kl": self.reference_kl / self.terms,
        }


@torch.no_grad()
def sum_terms(
    logprob: Terms,
    *,
    proximal: Terms,
    sampler: Terms,
    loss: Terms,
    is_cut: Bool[Tensor, " terms"],
    entropy: Terms,
    correction: Terms,
    reference: Terms | None = None,
) -> TermSums:
    """The sums over one pack's terms; `loss` comes weighted."""
    if not len(logprob):
        return TermSums()
    ratio = (logprob - proximal).exp()
    gap = logprob - sampler
    divergence = torch.zeros_like(gap) if reference is None else k3(reference - logprob)
    sums = [ratio, is_cut, k3(gap), gap.abs(), entropy, correction, divergence]
    peaks = [ratio.max(), gap.abs().max()]
    figures = torch.stack([figure.double() for figure in (loss.sum(), *(one.sum() for one in sums), *peaks)]).tolist()
    return TermSums(float(len(logprob)), *figures)


def mean(values: Iterable[float]) -> float:
    """The mean; 0 of nothing."""
    found = list(values)
    return math.fsum(found) / len(found) if found else 0.0

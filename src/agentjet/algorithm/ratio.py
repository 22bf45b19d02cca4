"""Ratios of probabilities, of single terms and of the sequences that they make up.

A term is one sampled token; all tensors are aligned by term, and `sequence` gives each term the index of its sequence.

Invariants: log-probs are float32 (or wider); a term that does not train is not among them
(`agentjet.algorithm.selection`), so whatever stood there can reach neither value nor gradient; a recorded log-prob that
is not a number is refused, never averaged away.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

Terms = Float[Tensor, " terms"]
Sequences = Int[Tensor, " terms"]


def log_ratio(logprob: Terms, sampled: Terms) -> Terms:
    """log(pi / sampler) of each term. ValueError when a recorded log-prob is NaN."""
    return logprob - checked(sampled)


def checked(sampled: Terms) -> Terms:
    """The recorded log-probs. ValueError when one is not a number: its call should not have been merged."""
    if torch.isnan(sampled).any():
        raise ValueError("a trained term's recorded log-prob is NaN: its call should not have been merged")
    return sampled


def sequence_sum(values: Terms, sequence: Sequences) -> Terms:
    """Each term's sequence's sum."""
    return _totals(values, sequence)[sequence]


def sequence_mean(values: Terms, sequence: Sequences) -> Terms:
    """Each term's sequence's mean."""
    return (_totals(values, sequence) / _totals(torch.ones_like(values), sequence).clamp(min=1))[sequence]


def _totals(values: Terms, sequence: Sequences) -> Float[Tensor, " sequences"]:
    count = int(sequence.max()) + 1 if len(sequence) else 0
    return values.new_zeros(count).index_add(0, sequence, values)

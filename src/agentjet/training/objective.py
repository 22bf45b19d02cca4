"""The loss of one pack as a function of what the model said about its terms.

Invariant: a pack's loss needs nothing of the model but each term's log-prob and entropy, so it may be evaluated on the
model's own tensors or on leaves whose gradient is injected later; evaluating it again gives the same value and figures.
A sequence never reaches beyond its sample, so a pack holds it whole.

It does not know how log-probs are computed (`agentjet.training.tree_forward`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from agentjet.algorithm.correction import correction_weight
from agentjet.algorithm.divergence import divergence_loss
from agentjet.algorithm.loss import is_clipped, policy_loss
from agentjet.algorithm.metric import TermSums, sum_terms
from agentjet.algorithm.ratio import Sequences, Terms, checked
from agentjet.config import AlgorithmSettings
from agentjet.schemas.sample import Sample


class PackObjective:
    """Part of an optimizer step's loss: the sum over a pack's terms.

    Args:
        samples: Of the pack; terms are theirs, in this order.
        advantages: [samples][calls] of each call's terms.
        weights: [samples][calls] of each call's terms.
        proximal: [terms] log-prob that ratios refer to; None: the current policy's own.
        reference: [terms] log-prob of the frozen policy; None: there is none.
        settings: Loss, correction, divergence, entropy.
        device: Of the log-probs that it will be called with.

    Raises:
        ValueError: A sampler's log-prob is not a number.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        advantages: Sequence[Sequence[float]],
        weights: Sequence[Sequence[float]],
        *,
        proximal: Terms | None,
        reference: Terms | None,
        settings: AlgorithmSettings,
        device: torch.device,
    ) -> None:
        self._settings = settings
        self._advantage = _by_term(samples, advantages, device)
        self._weight = _by_term(samples, weights, device)
        self._sequence = sequence_of_terms(samples, settings, device)
        sampled = [value for sample in samples for value in sample.term_logprob]
        self._sampler = checked(torch.tensor(sampled, dtype=torch.float32, device=device))
        self._proximal = self._sampler if settings.proximal == "sampler" else proximal
        self._reference = reference
        self.sums = TermSums()
        """Figures of the last evaluation."""

    @property
    def needs_entropy_grad(self) -> bool:
        """Whether the entropy it is called with has to carry a gradient."""
        return self._settings.entropy_coefficient > 0

    def __call__(self, logprob: Terms, entropy: Terms) -> Tensor:
        """The loss, a scalar."""
        proximal = logprob.detach() if self._proximal is None else self._proximal
        correction = correction_weight(proximal, self._sampler, self._sequence, self._settings)
        terms = (self._advantage, self._sequence, self._settings)
        losses = policy_loss(logprob, proximal, *terms)
        if self._settings.kl in {"k2", "k3"}:
            assert self._reference is not None
            kl = divergence_loss(logprob, proximal, self._reference, self._settings)
            losses = losses + self._settings.kl_coefficient * kl
        losses = losses * correction
        if self.needs_entropy_grad:
            losses = losses - self._settings.entropy_coefficient * entropy
        losses = losses * self._weight
        self.sums = sum_terms(
            logprob.detach(),
            proximal=proximal,
            sampler=self._sampler,
            loss=losses,
            is_cut=is_clipped(logprob.detach(), proximal, *terms),
            entropy=entropy,
            correction=correction,
            reference=self._reference,
        )
        return losses.sum()


def sequence_of_terms(samples: Sequence[Sample], settings: AlgorithmSettings, device: torch.device) -> Sequences:
    """[terms] index of each term's sequence, a call or a sample."""
    if settings.sequence == "call":
        lengths = [call.num_terms for sample in samples for call in sample.calls]
    else:
        lengths = [len(sample.term_logprob) for sample in samples]
    return torch.repeat_interleave(torch.tensor(lengths, dtype=torch.long)).to(device)


def _by_term(samples: Sequence[Sample], values: Sequence[Sequence[float]], device: torch.device) -> Terms:
    """[terms] a value of each call, repeated over its terms."""
    spread = [
        value
        for sample, row in zip(samples, values, strict=True)
        for call, value in zip(sample.calls, row, strict=True)
        for _ in range(call.num_terms)
    ]
    return torch.tensor(spread, dtype=torch.float32, device=device)

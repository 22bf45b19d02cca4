"""Log-probs of chosen tokens without the whole vocabulary in memory.

Logits exist for one chunk of rows at a time; the backward pass computes them again. Everything is float32 (or wider),
whatever the model around it computes in.

Invariant: log-prob = logit / temperature less the log-sum-exp of logits / temperature; never a log-prob divided by the
temperature.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK_ELEMENTS = 2**24
"""Logits that exist at once: 64 MiB of float32."""


class _ScoredLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, temperature: Tensor, rows: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprob = hidden.new_empty(len(targets))
        entropy = hidden.new_empty(len(hidden))
        lse = hidden.new_empty(len(hidden))
        for start, stop, members in _chunks(rows, hidden, weight):
            logits = (hidden[start:stop] / temperature[start:stop, None]) @ weight.T
            lse[start:stop] = logits.logsumexp(-1)
            local = rows[members] - start
            logprob[members] = logits[local, targets[members]] - lse[rows[members]]
            probs = (logits - lse[start:stop, None]).exp_()
            entropy[start:stop] = lse[start:stop] - torch.linalg.vecdot(probs, logits)
        ctx.save_for_backward(hidden, weight, temperature, rows, targets, lse)
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, temperature, rows, targets, lse = ctx.saved_tensors
        grad = grads[0]
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight)
        total = hidden.new_zeros(len(hidden)).index_add_(0, rows, grad)
        with torch.autocast(hidden.device.type, enabled=False):
            for start, stop, members in _chunks(rows, hidden, weight):
                scaled = hidden[start:stop] / temperature[start:stop, None]
                # d logprob / d logits = onehot(target) - softmax, summed over the terms of a row.
                step = (scaled @ weight.T).sub_(lse[start:stop, None]).exp_().mul_(-total[start:stop, None])
                step.index_put_((rows[members] - start, targets[members]), grad[members], accumulate=True)
                grad_hidden[start:stop] = (step @ weight) / temperature[start:stop, None]
                grad_weight.addmm_(step.T, scaled)
        return grad_hidden, grad_weight, None, None, None


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return weight.to(dtype).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight as an engine of another type holds it, in its own type; the gradient passes unrounded."""
    return weight if dtype == weight.dtype else _Rounded.apply(weight, dtype)  # type: ignore[return-value]


def scored_logprobs(
    hidden: Float[Tensor, "rows hidden"],
    weight: Float[Tensor, "vocab hidden"],
    temperature: Float[Tensor, " rows"],
    rows: Int[Tensor, " terms"],
    targets: Int[Tensor, " terms"],
) -> tuple[Float[Tensor, " terms"], Float[Tensor, " rows"]]:
    """The log-prob of each term's token, and each row's entropy (no gradient).

    Args:
        hidden: The model's last hidden state at every position where something is predicted.
        weight: Output projection.
        temperature: Of each row's distribution; above 0.
        rows: [terms] the row that predicts the term, ascending.
        targets: [terms] id of the sampled token.
    """
    precision = torch.promote_types(hidden.dtype, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        return _ScoredLogProbs.apply(
            hidden.to(precision), weight.to(precision), temperature.to(precision), rows, targets
        )  # type: ignore[return-value]


def _chunks(rows: Tensor, hidden: Tensor, weight: Tensor) -> list[tuple[int, int, slice]]:
    """(first row, row after the last, terms) of each chunk."""
    size = max(1, CHUNK_ELEMENTS // len(weight))
    edges = [*range(0, len(hidden), size), len(hidden)]
    places = torch.searchsorted(rows, torch.tensor(edges, device=rows.device)).tolist()
    return [
        (start, stop, slice(first, last))
        for start, stop, first, last in zip(edges, edges[1:], places, places[1:], strict=False)
    ]

"""Log-probs of chosen tokens without the whole vocabulary in memory.

Logits exist for one chunk of rows at a time and are float32 (or wider), whatever the model around them computes in. The
first chunks keep their probabilities for the backward pass, in the type of the model's gradients; further ones are
computed again, so that memory does not grow with the number of rows.

Invariant: log-prob = logit / temperature less the log-sum-exp of logits / temperature; never a log-prob divided by the
temperature.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK_ELEMENTS = 2**25
"""Logits that exist at once: 128 MiB of float32."""
KEPT_ELEMENTS = 2**26
"""Probabilities that are kept for the backward pass: 128 MiB of bfloat16."""


class _ScoredLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        temperature: Tensor,
        rows: Tensor,
        targets: Tensor,
        grad_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        logprob = hidden.new_empty(len(targets))
        entropy = hidden.new_empty(len(hidden))
        kept: list[Tensor] = []
        num_kept = 0
        for start, stop, members in _chunks(rows, hidden, weight):
            all_logprobs = _logprobs(hidden[start:stop], weight, temperature[start:stop])
            logprob[members] = all_logprobs[rows[members] - start, targets[members]]
            probs = all_logprobs.exp()
            entropy[start:stop] = -torch.linalg.vecdot(probs, all_logprobs)
            num_kept += probs.numel()
            if num_kept <= KEPT_ELEMENTS and any(ctx.needs_input_grad):
                kept.append(probs.to(grad_dtype))
        ctx.save_for_backward(hidden, weight, temperature, rows, targets, *kept)
        ctx.grad_dtype = grad_dtype
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden, weight, temperature, rows, targets, *kept = ctx.saved_tensors
        dtype = ctx.grad_dtype
        grad = grads[0]
        grad_hidden = torch.zeros_like(hidden)
        grad_weight: Tensor | None = None
        total = hidden.new_zeros(len(hidden)).index_add_(0, rows, grad).to(dtype)
        projection = weight.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for index, (start, stop, members) in enumerate(_chunks(rows, hidden, weight)):
                if index < len(kept):
                    probs = kept[index]
                else:
                    probs = _logprobs(hidden[start:stop], weight, temperature[start:stop]).exp_().to(dtype)
                # d logprob / d logits = onehot(target) - softmax, summed over the terms of a row.
                step = probs * -total[start:stop, None]
                step.index_put_((rows[members] - start, targets[members]), grad[members].to(dtype), accumulate=True)
                scaled = (hidden[start:stop] / temperature[start:stop, None]).to(dtype)
                grad_hidden[start:stop] = (step @ projection) / temperature[start:stop, None]
                part = (step.T @ scaled).to(weight.dtype)
                grad_weight = part if grad_weight is None else grad_weight.add_(part)
        return grad_hidden, grad_weight, None, None, None, None


def _logprobs(hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    """[rows, vocab] of one chunk."""
    return ((hidden / temperature[:, None]) @ weight.T).log_softmax(-1)


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
    *,
    grad_dtype: torch.dtype | None = None,
) -> tuple[Float[Tensor, " terms"], Float[Tensor, " rows"]]:
    """The log-prob of each term's token, and each row's entropy (no gradient).

    Args:
        hidden: The model's last hidden state at every position where something is predicted.
        weight: Output projection.
        temperature: Of each row's distribution; above 0.
        rows: [terms] the row that predicts the term, ascending.
        targets: [terms] id of the sampled token.
        grad_dtype: Type of the backward pass's matrix products; the log-probs' own by default.
    """
    precision = torch.promote_types(hidden.dtype, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        return _ScoredLogProbs.apply(
            hidden.to(precision),
            weight.to(precision),
            temperature.to(precision),
            rows,
            targets,
            grad_dtype or precision,
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

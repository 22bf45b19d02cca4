"""Log-probs of chosen tokens without the whole vocabulary in memory.

Logits exist for one chunk of rows at a time and are float32 (or wider), whatever the model around them computes in; a
chunk fits a processor's cache. The first rows keep their probabilities for the backward pass, in the type of the
model's gradients; further ones are computed again, so that memory does not grow with the number of rows. Where the
backward pass needs more than the probabilities (an entropy with a gradient, capped logits) all rows are.

Invariant: log-prob = logit / temperature less the log-sum-exp of logits / temperature; never a log-prob divided by the
temperature.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK_ELEMENTS = 2**22
"""Logits that exist at once: 16 MiB of float32."""
BLOCK_ELEMENTS = 2**26
"""Probabilities that are kept, and logits whose gradients exist at once: 128 MiB of bfloat16. Blocks are large because
each adds a gradient as large as the weight."""


@dataclass(frozen=True, slots=True)
class _Head:
    """What does not change between chunks."""

    weight: Tensor
    grad_dtype: torch.dtype
    softcap: float | None
    has_entropy_grad: bool

    @property
    def keeps_probs(self) -> bool:
        """Whether the probabilities are all that the backward pass needs."""
        return self.softcap is None and not self.has_entropy_grad

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] of one chunk, before the temperature."""
        logits = hidden @ self.weight.T
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap

    def logprobs(self, hidden: Tensor, temperature: Tensor) -> Tensor:
        """[rows, vocab] of one chunk."""
        if self.softcap is None:
            # Rows are shorter than the vocabulary: the temperature is cheaper here than on the logits.
            return self.logits(hidden / temperature[:, None]).log_softmax(-1)
        return (self.logits(hidden) / temperature[:, None]).log_softmax(-1)


class _ScoredLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        temperature: Tensor,
        rows: Tensor,
        targets: Tensor,
        head: _Head,
    ) -> tuple[Tensor, Tensor]:
        logprob = hidden.new_empty(len(targets))
        entropy = hidden.new_empty(len(hidden))
        num_kept = _num_rows(BLOCK_ELEMENTS, weight) if head.keeps_probs and any(ctx.needs_input_grad) else 0
        kept = hidden.new_empty(min(num_kept, len(hidden)), len(weight), dtype=head.grad_dtype)
        for part in _cut(slice(0, len(hidden)), _num_rows(CHUNK_ELEMENTS, weight)):
            members = _members(rows, part)
            all_logprobs = head.logprobs(hidden[part], temperature[part])
            logprob[members] = all_logprobs[rows[members] - part.start, targets[members]]
            probs = all_logprobs.exp()
            entropy[part] = -torch.linalg.vecdot(probs, all_logprobs)
            kept[part] = probs[: max(0, len(kept) - part.start)]
        ctx.save_for_backward(hidden, temperature, rows, targets, logprob, entropy, kept)
        ctx.head = head
        if not head.has_entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden, temperature, rows, targets, logprob, entropy, kept = ctx.saved_tensors
        head: _Head = ctx.head
        total = hidden.new_zeros(len(hidden)).index_add_(0, rows, grads[0])
        pull = _Pull(head, hidden, temperature, rows, targets, logprob, entropy, kept, grads[0], grads[1], total)
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        projection = head.weight.to(head.grad_dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for block in _cut(slice(0, len(hidden)), _num_rows(BLOCK_ELEMENTS, head.weight)):
                step, heat = pull.block(block), temperature[block, None]
                grad_hidden[block] = (step @ projection) / heat
                if ctx.needs_input_grad[1]:
                    share = (step.T @ (hidden[block] / heat).to(step.dtype)).to(head.weight.dtype)
                    grad_weight = share if grad_weight is None else grad_weight.add_(share)
        return grad_hidden, grad_weight, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Pull:
    """The gradient at the logits, block by block."""

    head: _Head
    hidden: Tensor
    temperature: Tensor
    rows: Tensor
    targets: Tensor
    logprob: Tensor
    """[terms]"""
    entropy: Tensor
    kept: Tensor
    grad: Tensor
    """[terms]"""
    entropy_grad: Tensor
    """[rows]"""
    total: Tensor
    """[rows] sum of the gradients of a row's terms."""

    def block(self, block: slice) -> Tensor:
        """[rows, vocab] of some rows, in the gradients' type."""
        if block.stop <= len(self.kept):
            # Kept for this one use: autograd refuses a second backward pass over a tensor that was changed.
            step = self.kept[block].mul_(-self.total[block, None].to(self.kept.dtype))
            return self._set_targets(block, step)
        step = self.hidden.new_empty(block.stop - block.start, len(self.head.weight), dtype=self.head.grad_dtype)
        for part in _cut(block, _num_rows(CHUNK_ELEMENTS, self.head.weight)):
            step[part.start - block.start : part.stop - block.start] = self._again(part)
        return step

    def _again(self, part: slice) -> Tensor:
        """[rows, vocab] of one chunk, from its logits.

        d entropy / d logits = -p (log p + entropy).
        """
        all_logprobs = self.head.logprobs(self.hidden[part], self.temperature[part])
        total = self.total[part, None]
        if self.head.has_entropy_grad:
            probs = all_logprobs.exp()
            slope = all_logprobs.add_(self.entropy[part, None]).mul_(self.entropy_grad[part, None])
            step = probs.mul_(slope.add_(total).neg_())
        else:
            step = all_logprobs.exp_().mul_(-total)
        self._add_targets(part, step)
        if self.head.softcap is not None:
            # d (c tanh(x / c)) / dx = 1 - tanh(x / c)^2
            step *= 1 - (self.head.logits(self.hidden[part]) / self.head.softcap).square_()
        return step

    def _set_targets(self, block: slice, step: Tensor) -> Tensor:
        """The entries of the sampled tokens, from float32: an almost certain one has 1 - p, lost in a rounded p."""
        members, num_ids = _members(self.rows, block), step.shape[1]
        places, which = torch.unique(self.rows[members] * num_ids + self.targets[members], return_inverse=True)
        pull, prob = self.grad.new_zeros(2, len(places))
        pull.index_add_(0, which, self.grad[members])
        prob[which] = self.logprob[members].exp()
        rows = places // num_ids
        step[rows - block.start, places % num_ids] = (pull - self.total[rows] * prob).to(step.dtype)
        return step

    def _add_targets(self, part: slice, step: Tensor) -> Tensor:
        """d logprob / d logits = onehot(target) - softmax, summed over the terms of a row: the first half."""
        members = _members(self.rows, part)
        place = (self.rows[members] - part.start, self.targets[members])
        return step.index_put_(place, self.grad[members].to(step.dtype), accumulate=True)


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
    softcap: float | None = None,
    entropy_grad: bool = False,
) -> tuple[Float[Tensor, " terms"], Float[Tensor, " rows"]]:
    """The log-prob of each term's token, and each row's entropy in nats.

    Args:
        hidden: The model's last hidden state at every position where something is predicted.
        weight: Output projection.
        temperature: Of each row's distribution; above 0.
        rows: [terms] the row that predicts the term, ascending.
        targets: [terms] id of the sampled token.
        grad_dtype: Type of the backward pass's matrix products; the log-probs' own by default.
        softcap: Bound c of capped logits, c tanh(logit / c) (Gemma 2, arXiv:2408.00118, section 2).
        entropy_grad: Whether the entropy carries a gradient, at the price of computing all logits twice.
    """
    precision = torch.promote_types(hidden.dtype, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        wide = weight.to(precision)
        head = _Head(wide.detach(), grad_dtype or precision, softcap, entropy_grad)
        return _ScoredLogProbs.apply(hidden.to(precision), wide, temperature.to(precision), rows, targets, head)  # type: ignore[return-value]


def _num_rows(num_elements: int, weight: Tensor) -> int:
    return max(1, num_elements // len(weight))


def _cut(whole: slice, num_rows: int) -> Iterator[slice]:
    """Pieces of at most `num_rows`."""
    for start in range(whole.start, whole.stop, num_rows):
        yield slice(start, min(start + num_rows, whole.stop))


def _members(rows: Tensor, part: slice) -> slice:
    """The terms of some rows; `rows` of terms ascend."""
    edges = torch.tensor([part.start, part.stop], device=rows.device)
    return slice(*torch.searchsorted(rows, edges).tolist())

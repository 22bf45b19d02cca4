"""Gradients of a forest that is larger than memory: stretch by stretch, exact.

The forest's tokens stand in preorder, so a depth-first walk is a walk from left to right, and every stretch of it needs
nothing but itself and keys and values of earlier tokens. Three passes:

1. Forward without a graph: the keys and values of each layer are kept, and every term's log-prob and entropy.
2. The objective on these, as leaves: its gradient at each log-prob and entropy. So losses that couple terms
   (a sequence's ratio) need nothing else.
3. Backward from the last stretch to the first. Each is computed again with a graph, and pulled back from its terms'
   gradients and from what later stretches left for its keys and values. Then all its descendants are done, so nothing
   is missing.

Invariants: the gradient is that of one graph, but for rounding; memory is one stretch's activations, and for every
token its keys, values and their gradients. Which stretches there are depends on shapes only.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentjet.training.tree_forward import TreeInput, output_weight, sorted_logprobs, tree_logprobs

Objective = Callable[[Tensor, Tensor], Tensor]
"""(log-prob [terms], entropy [terms]) to a scalar loss."""


class KeyStore:
    """Keys and values of all tokens and layers, and the gradients that later stretches leave for them."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._states: dict[int, tuple[Tensor, Tensor]] = {}
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores a stretch's own [tokens, heads * head_dim] from position `start` on; returns those of all tokens."""
        if layer not in self._states:
            self._states[layer] = (
                key.new_zeros(self._num_tokens, key.shape[1]),
                value.new_zeros(self._num_tokens, value.shape[1]),
            )
        for states, own in zip(self._states[layer], (key, value), strict=True):
            states[start : start + len(own)] = own
        return self._states[layer]

    def gradients(self, layer: int) -> tuple[Tensor, Tensor]:
        """Sums for keys and values, float32 or wider, to add to."""
        if layer not in self._gradients:
            keys, values = (
                torch.zeros_like(states, dtype=torch.promote_types(states.dtype, torch.float32))
                for states in self._states[layer]
            )
            self._gradients[layer] = (keys, values)
        return self._gradients[layer]


def backward_forest(
    model: PreTrainedModel,
    tree: TreeInput,
    objective: Objective,
    *,
    head_dtype: torch.dtype | None = None,
    entropy_grad: bool = False,
) -> Tensor:
    """Adds the gradient of a forest's objective to that of the weights; returns the objective's value.

    Args:
        model: A causal language model loaded by `agentjet.training.model`.
        tree: From `tree_input`; its borders say whether it is walked.
        objective: Evaluated once, on leaves where the forest is walked.
        head_dtype: As in `tree_logprobs`.
        entropy_grad: Whether the objective's gradient reaches the entropy.
    """
    if tree.is_whole:
        loss = objective(*tree_logprobs(model, tree, head_dtype=head_dtype, entropy_grad=entropy_grad))
        loss.backward()
        return loss.detach()
    store = KeyStore(tree.plan.num_tokens)
    logprob, entropy = (
        states.requires_grad_(needs_grad)
        for states, needs_grad in zip(_walk(model, tree, head_dtype, store), (True, entropy_grad), strict=True)
    )
    loss = objective(logprob, entropy)
    loss.backward()
    order = tree.term_order
    grads = [states.grad[order] if states.grad is not None else None for states in (logprob, entropy)]
    _walk_back(model, tree, grads, head_dtype, store)
    return loss.detach()


@torch.no_grad()
def forest_logprobs(
    model: PreTrainedModel, tree: TreeInput, *, head_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every term in the forest's order, without a gradient, within the same memory."""
    if tree.is_whole:
        return tree_logprobs(model, tree, head_dtype=head_dtype)
    return _walk(model, tree, head_dtype, KeyStore(tree.plan.num_tokens))


@torch.no_grad()
def _walk(
    model: PreTrainedModel, tree: TreeInput, head_dtype: torch.dtype | None, store: KeyStore
) -> tuple[Tensor, Tensor]:
    """Fills the store; the terms' log-probs and entropies in the forest's order."""
    weight = output_weight(model, head_dtype)
    parts = [sorted_logprobs(model, stretch, weight, carried=store) for stretch in tree.stretches()]
    logprob, entropy = (torch.empty_like(torch.cat(found)) for found in zip(*parts, strict=True))
    logprob[tree.term_order] = torch.cat([found for found, _ in parts])
    entropy[tree.term_order] = torch.cat([found for _, found in parts])
    return logprob, entropy


def _walk_back(
    model: PreTrainedModel,
    tree: TreeInput,
    grads: list[Tensor | None],
    head_dtype: torch.dtype | None,
    store: KeyStore,
) -> None:
    """Adds every stretch's gradient, last stretch first; `grads` of log-prob and entropy are in sorted order."""
    weight = output_weight(model, head_dtype)
    stop = len(tree.term_order)
    for stretch in reversed(tree.stretches()):
        terms = slice(stop - len(stretch.term_order), stop)
        found = sorted_logprobs(model, stretch, weight, entropy_grad=grads[1] is not None, carried=store)
        pulled = [(states, grad[terms]) for states, grad in zip(found, grads, strict=True) if grad is not None]
        torch.autograd.backward([states for states, _ in pulled], [grad for _, grad in pulled])
        stop = terms.start

"""How many tokens of a forest may be computed at once under a budget of memory.

An estimate from shapes: what autograd keeps of a gated decoder layer per token, with a margin for what architectures
add to the plain one (norms after a layer) and for the tensors of the layer in work. Weights,
optimizer state and the output head (about half a GiB) are not in it, for no forest changes them.

Invariant: the answer is a function of shapes and settings, never of memory that happens to be free, so that the same
log gives the same stretches on every machine.
"""

from dataclasses import dataclass

import torch

from agentjet.merging import Forest
from agentjet.merging.flop import ModelShape
from agentjet.training.attention import KEPT_PER_TOKEN

MIN_TOKENS = 64
"""Shortest stretch; a smaller budget is exceeded."""
FILLED_RATIO = 0.85
"""Of the budget; an allocator's gaps take the rest."""
WALKED_RATIO = 0.66
"""Of the budget where a forest is walked: stretches leave more gaps, and gathered keys and the output head come beside.
Filled to 0.85 a walk of 33,872 tokens took 113 and 126 % of that on two processors, filled to 0.72 139 %, to 0.66 141 %
(`benchmarks/memory.py`)."""
MARGIN = 1.25
"""Over the plain decoder's count; norms after a layer, which Gemma adds, need the most of it."""
HIDDEN_BYTES = 26
"""Of a layer and a hidden unit: the residual stream in float32, and what products read, in 16 or 32 bits."""

HEAD_BYTES = 10
"""Of a layer and a unit of queries or keys: what norms of their own keep in float32."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Most bytes that a pack's activations may take, as estimated."""

    shape: ModelShape
    dtype: torch.dtype
    """Of the matrix products."""
    num_bytes: int

    def stretch_tokens(self, forest: Forest) -> int:
        """Most tokens at once: all of them where they fit, else what carried keys and values leave room for."""
        if self.activation_bytes(forest) * forest.num_tokens <= FILLED_RATIO * self.num_bytes:
            return forest.num_tokens
        rest = WALKED_RATIO * self.num_bytes - self.carried_bytes * forest.num_tokens
        return min(forest.num_tokens, max(MIN_TOKENS, int(rest // self.activation_bytes(forest))))

    def activation_bytes(self, forest: Forest) -> float:
        """Of a token, all layers, kept for the backward pass."""
        shape, size = self.shape, self.dtype.itemsize
        plain = (
            HIDDEN_BYTES * shape.hidden_size
            # Gate, up, its activation, their product; then query and output, key and value.
            + 4 * size * shape.intermediate_size
            + (2 * size + HEAD_BYTES) * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        )
        return shape.num_layers * (MARGIN * plain + size * self._kept_weights(forest))

    @property
    def carried_bytes(self) -> int:
        """Of a token that is walked: keys and values of all layers, and their gradients."""
        wide = torch.promote_types(self.dtype, torch.float32).itemsize
        return 2 * self.shape.num_layers * self.shape.num_kv_heads * self.shape.head_dim * (self.dtype.itemsize + wide)

    def _kept_weights(self, forest: Forest) -> float:
        """Attention weights of a layer that a token keeps, at most: each stretch decides by its own mean depth."""
        return min(self.shape.num_heads * float(forest.depths.mean() + 1), KEPT_PER_TOKEN)

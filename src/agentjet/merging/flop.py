"""What a training step costs in floating-point operations: the exact work, and so the bound on what merging can gain.

A multiply-add counts two. Matrix products count, nothing else: linear layers by their weights, attention by the exact
number of query-key pairs (a token attends to itself and its ancestors, within a layer's window), the output head by its
scored rows. A backward pass costs twice its forward pass, recomputation is overhead and never counted.

The *bound* of a speed-up is the ratio of two such sums. It knows neither tensors nor kernels nor time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentjet.merging.forest import Forest, Int64Array
from agentjet.schemas.sample import Sample

PASSES = 3
"""Forward passes that a forward and a backward pass are worth."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a decoder's configuration decides its cost."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    windows: tuple[int, ...]
    """[layers] how many tokens of its path a token sees, itself included; 0 is all of them."""

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """That of a Transformers configuration of a decoder with gated feed-forward layers."""
        num_heads = config.num_attention_heads
        return cls(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            vocab_size=config.vocab_size,
            windows=_windows(config),
        )

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrices: queries, keys, values, output; gate, up, down."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size


@dataclass(frozen=True, slots=True)
class Workload:
    """What is computed in one step."""

    num_tokens: int
    num_rows: int
    """Distributions over the vocabulary."""
    num_pairs: Mapping[int, int]
    """Query-key pairs of a layer, by its window (0: none)."""

    def __add__(self, other: "Workload") -> "Workload":
        pairs = {window: self.num_pairs[window] + other.num_pairs[window] for window in self.num_pairs}
        return Workload(self.num_tokens + other.num_tokens, self.num_rows + other.num_rows, pairs)


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of a forward and a backward pass."""

    linear: int
    attention: int
    head: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.linear + self.attention + self.head


def step_flops(shape: ModelShape, work: Workload) -> Flops:
    """Operations of forward and backward over a workload."""
    pairs = sum(work.num_pairs[window] for window in shape.windows)
    return Flops(
        linear=PASSES * 2 * work.num_tokens * shape.num_layers * shape.layer_weights,
        # Queries with keys, and weights with values.
        attention=PASSES * 2 * 2 * pairs * shape.num_heads * shape.head_dim,
        head=PASSES * 2 * work.num_rows * shape.hidden_size * shape.vocab_size,
    )


def forest_workload(shape: ModelShape, forest: Forest, num_rows: int | None = None) -> Workload:
    """Each unique token once; `num_rows` defaults to the positions where something is predicted."""
    if num_rows is None:
        num_rows = len(np.unique(forest.term_predictor))
    return Workload(forest.num_tokens, num_rows, _pairs(shape, forest.depths + 1))


def row_workload(shape: ModelShape, lengths: Sequence[int] | Int64Array, num_scored: int) -> Workload:
    """Rows of their own, without padding.

    Args:
        shape: Of the model.
        lengths: [rows] tokens of each, prompt and completion.
        num_scored: Terms of all rows together; each is predicted at a place of its own.
    """
    sizes = np.asarray(lengths, np.int64)
    return Workload(int(sizes.sum()), num_scored, _pairs_of_rows(shape, sizes))


def unmerged_workload(shape: ModelShape, samples: Sequence[Sample], forest: Forest) -> Workload:
    """Every call of the samples as one row, up to its last term; `forest` is theirs."""
    counts = np.array([call.num_terms for sample in samples for call in sample.calls], np.int64)
    lasts = np.cumsum(counts)[counts > 0] - 1
    return row_workload(shape, forest.depths[forest.term_target[lasts]] + 1, int(counts.sum()))


def flop_ratio(shape: ModelShape, unmerged: Workload, merged: Workload) -> float:
    """By how much the merged workload is cheaper: the bound of any speed-up."""
    return step_flops(shape, unmerged).total / step_flops(shape, merged).total


def _pairs(shape: ModelShape, num_visible: Int64Array) -> dict[int, int]:
    """By window, from how many tokens each token's path holds."""
    return {
        window: int((np.minimum(num_visible, window) if window else num_visible).sum())
        for window in dict.fromkeys(shape.windows)
    }


def _pairs_of_rows(shape: ModelShape, lengths: Int64Array) -> dict[int, int]:
    found: dict[int, int] = {}
    for window in dict.fromkeys(shape.windows):
        head = np.minimum(lengths, window) if window else lengths
        # The first `window` tokens see all before them, each further one sees `window`.
        found[window] = int((head * (head + 1) // 2 + (lengths - head) * window).sum())
    return found


def _windows(config: Any) -> tuple[int, ...]:
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)

"""Ancestor-only attention over a forest, as an attention implementation of unpatched Transformers models.

Tokens stand in preorder, so those from `s` on that lie in one run of the forest see only that run and the ancestors of
the token at `s`: any ancestor before `s` of a token in the run is an ancestor of `s` as well. The forest is cut into
equal runs; each attends to its gathered keys under one additive mask that all layers share. One run is the dense mask.

Invariants:

- A token attends to itself and its ancestors, nothing else; windows count in depth, as in an unmerged row.
- The cut depends on the forest's shape only, never on measured time.
- Transformers builds no mask of its own for an implementation it does not know, and none of its guesses about packed
  rows (it reads decreasing position ids so) can apply.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from agentjet.merging import Forest

IMPLEMENTATION = "agentjet_tree"
RUN_LENGTHS = (32, 64, 128, 256, 512)
"""Candidates for the length of a run, tokens."""
GATHER_COST = 16
"""What it costs to gather a key for a run, in query-key pairs."""
EXPLICIT_ELEMENTS = 2**22
"""Most attention weights of a layer that are kept for the backward pass on CPU, where that is two to three times as
fast as the fused kernel."""


@dataclass(slots=True)
class AttentionPlan:
    """Which keys each run of queries gathers, and what it may see of them."""

    num_tokens: int
    run_length: int
    keys: Tensor
    """[runs, keys] positions gathered for each run; padded with position 0."""
    depth_gap: Tensor
    """[runs, queries, keys] depth of the query less that of the key; -1 where the key is not visible."""
    _masks: dict[tuple[int, int, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, num_shared: int, dtype: torch.dtype) -> Tensor:
        """[runs, 1, num_shared * queries, keys] additive, 0 where visible; cached for all layers.

        `window` counts depth; `num_shared` query heads of one key head lie side by side.
        """
        key = (window or 0, num_shared, dtype)
        if key not in self._masks:
            is_visible = self.depth_gap >= 0
            if window:
                is_visible &= self.depth_gap < window
            # The least number instead of -inf: a tile of keys without a visible one then has no NaN to carry on.
            hidden = torch.zeros(is_visible.shape, dtype=dtype, device=is_visible.device)
            self._masks[key] = hidden.masked_fill_(~is_visible, torch.finfo(dtype).min).repeat(1, num_shared, 1)[
                :, None
            ]
        return self._masks[key]


def plan_attention(forest: Forest, device: torch.device | str = "cpu") -> AttentionPlan:
    """The cheapest cut of a forest."""
    segments = _segment_of(forest)
    candidates = [length for length in RUN_LENGTHS if length < forest.num_tokens]
    length = min([*candidates, forest.num_tokens], key=lambda length: (_cost(forest, length), length))
    starts = range(0, forest.num_tokens, length)
    paths = [_ancestors(forest, segments, start) for start in starts]
    num_keys = max(map(len, paths)) + length
    keys = np.zeros((len(paths), num_keys), np.int64)
    is_real = np.zeros((len(paths), num_keys), bool)
    queries = np.minimum(np.arange(len(paths) * length), forest.num_tokens - 1).reshape(len(paths), length)
    for row, (start, path) in enumerate(zip(starts, paths, strict=True)):
        found = np.concatenate([path, np.arange(start, min(start + length, forest.num_tokens))])
        keys[row, : len(found)] = found
        is_real[row, : len(found)] = True
    gap = _depth_gap(forest, queries, keys, is_real)
    return AttentionPlan(forest.num_tokens, length, torch.from_numpy(keys).to(device), torch.from_numpy(gap).to(device))


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_plan: AttentionPlan,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """[1, heads, tokens, head_dim] queries to [1, tokens, heads, head_dim] outputs.

    Query heads of one key head are laid side by side as further queries, so keys and values are never repeated.
    """
    device, num_runs, num_keys = query.device.type, *tree_plan.keys.shape
    length, num_heads, num_kv_heads, size = tree_plan.run_length, query.shape[1], key.shape[1], query.shape[3]
    num_shared = num_heads // num_kv_heads
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    padding = num_runs * length - tree_plan.num_tokens
    queries = pad(query[0].to(dtype), (0, 0, 0, padding)).view(num_kv_heads, num_shared, num_runs, length, size)
    queries = queries.permute(2, 0, 1, 3, 4).reshape(num_runs, num_kv_heads, num_shared * length, size)
    keys, values = key.to(dtype), value.to(dtype)
    if num_runs > 1:
        flat = tree_plan.keys.view(-1)
        keys, values = (
            states[0].index_select(1, flat).view(num_kv_heads, num_runs, num_keys, size).transpose(0, 1)
            for states in (keys, values)
        )
    mask = tree_plan.mask(sliding_window, num_shared, dtype)
    scale = size**-0.5 if scaling is None else scaling
    if device == "cpu" and num_heads * mask[0, 0, :length].numel() * num_runs <= EXPLICIT_ELEMENTS:
        with torch.autocast(device, enabled=False):
            scores = (queries * scale) @ keys.transpose(-1, -2)
            out = (scores + mask).softmax(-1) @ values
    else:
        out = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    out = out.view(num_runs, num_heads, length, size).transpose(1, 2).reshape(1, num_runs * length, num_heads, size)
    return out[:, : tree_plan.num_tokens], None


AttentionInterface.register(IMPLEMENTATION, tree_attention)


def _segment_of(forest: Forest) -> npt.NDArray[np.int64]:
    """[tokens] the segment of each token."""
    return np.repeat(np.arange(len(forest.segments)), [len(segment.ids) for segment in forest.segments])


def _cost(forest: Forest, length: int) -> int:
    """Of a cut into runs, in query-key pairs, padding included."""
    starts = np.arange(0, forest.num_tokens, length)
    num_keys = int(forest.depths[starts].max()) + length
    gathered = len(starts) * num_keys * GATHER_COST if len(starts) > 1 else 0
    return len(starts) * length * num_keys + gathered


def _ancestors(forest: Forest, segments: npt.NDArray[np.int64], position: int) -> npt.NDArray[np.int64]:
    """Positions of the ancestors of a token, root first."""
    index = int(segments[position])
    runs = [np.arange(forest.starts[index], position)]
    while (index := forest.segments[index].parent) >= 0:
        runs.append(forest.starts[index] + np.arange(len(forest.segments[index].ids)))
    return np.concatenate(runs[::-1])


def _depth_gap(
    forest: Forest, queries: npt.NDArray[np.int64], keys: npt.NDArray[np.int64], is_real: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int32]:
    """[runs, queries, keys] depth of the query less that of the key; -1 where the key is no ancestor or padding."""
    # In preorder a token's subtree is one run: k is an ancestor of q, or q itself, when k <= q < end of k's subtree.
    ends = _subtree_ends(forest)
    is_ancestor = (
        (keys[:, None] <= queries[:, :, None]) & (queries[:, :, None] < ends[keys][:, None]) & is_real[:, None]
    )
    gap = forest.depths[queries][:, :, None] - forest.depths[keys][:, None]
    return np.where(is_ancestor, gap, -1).astype(np.int32)


def _subtree_ends(forest: Forest) -> npt.NDArray[np.int64]:
    """[tokens] position after the last descendant of each token."""
    ends = [int(start) + len(segment.ids) for start, segment in zip(forest.starts, forest.segments, strict=True)]
    for index in range(len(ends) - 1, -1, -1):
        parent = forest.segments[index].parent
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[index])
    return np.array(ends, np.int64)[_segment_of(forest)]

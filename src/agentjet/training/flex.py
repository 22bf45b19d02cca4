"""Ancestor-only attention as one fused kernel: PyTorch's flex attention under a block mask.

In preorder a token's subtree is one run, so "k is an ancestor of q, or q itself" is two comparisons of integers; the
kernel skips every block of pairs in which that never holds. It is chosen on CUDA, for forests that are computed at
once; on CPU it has no backward pass.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from agentjet.training.attention_plan import AttentionPlan

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) to whether the query sees the key."""


MIN_HEAD_DIM = 16
"""Smallest that the kernel takes."""


@cache
def compiled_kernel() -> Any:
    """The kernel, compiled once for all sizes of forests."""
    return torch.compile(flex_attention, dynamic=True)


def ancestor_mask(plan: AttentionPlan, window: int | None) -> MaskFunction:
    """Whether a key is an ancestor of the query, or the query itself; a window counts depth."""
    ends = torch.from_numpy(plan.ends).to(plan.device)
    depths = torch.from_numpy(plan.forest.depths).to(plan.device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    if not window:
        return sees
    reach = window

    def sees_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(batch, head, query, key) & (depths[query] - depths[key] < reach)

    return sees_near


def block_mask(plan: AttentionPlan, window: int | None) -> BlockMask:
    """The blocks of pairs to compute; made once for all layers."""
    key = window or 0
    if key not in plan.block_masks:
        plan.block_masks[key] = create_block_mask(
            ancestor_mask(plan, window), None, None, plan.num_tokens, plan.num_tokens, device=str(plan.device)
        )
    return plan.block_masks[key]


def flex_tree_attention(
    kernel: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[1, heads, tokens, head_dim] of queries, keys and values alike to the same of outputs."""
    cap = softcap or 1.0

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return kernel(
        query,
        key,
        value,
        score_mod=capped if softcap is not None else None,
        block_mask=block_mask(plan, window),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )

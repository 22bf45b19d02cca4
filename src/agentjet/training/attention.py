"""Ancestor-only attention over a forest, as an attention implementation of unpatched Transformers models.

The forest is cut into runs (`agentjet.training.attention_plan`), and each run attends by plain matrix products to the
keys that it gathers: the exact pairs but for the triangle of the run itself, and no mask as large as the forest. On CPU
that is two to three times as fast as the fused kernel; on CUDA a fused kernel takes forests that are computed at once
(`agentjet.training.flex`). Where the weights of a layer are few they are kept for the backward pass; otherwise they are
computed again.

Invariants:

- Gradients of keys that several runs read are summed in float32 or wider.
- Keys and values may reach back before the tokens that are computed: see `CarriedKeys`.
- Transformers builds no mask of its own for an implementation it does not know, and none of its guesses about packed
  rows (it reads decreasing position ids so) can apply.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from agentjet.training.attention_plan import AttentionPlan, Run
from agentjet.training.flex import MIN_HEAD_DIM, compiled_kernel, flex_tree_attention

IMPLEMENTATION = "agentjet_tree"
KEPT_PER_TOKEN = 8192
"""Most attention weights that a token keeps for the backward pass, all heads of a layer together."""


class CarriedKeys(Protocol):
    """Keys and values of the whole forest, for a stretch of it that is computed by itself."""

    def extend(self, layer: int, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores those of a stretch; returns all [tokens of the forest, heads * head_dim]."""
        ...

    def gradients(self, layer: int) -> tuple[Tensor, Tensor]:
        """What later stretches left for keys and values, to add to; of the same shapes."""
        ...


@dataclass(frozen=True, slots=True)
class _Kind:
    """What does not change between the runs of a layer."""

    plan: AttentionPlan
    window: int | None
    num_kv_heads: int
    scale: float
    softcap: float | None
    layer: int
    carried: CarriedKeys | None
    keeps_weights: bool

    @property
    def runs(self) -> tuple[Run, ...]:
        return self.plan.runs(self.window)

    def queries(self, run: Run, states: Tensor) -> Tensor:
        """[kv_heads, queries * shared, head_dim] of [tokens, heads, head_dim]: heads that share keys lie together."""
        places = slice(run.queries.start - self.plan.start, run.queries.stop - self.plan.start)
        found = states[places].unflatten(1, (self.num_kv_heads, -1)).transpose(0, 1)
        return found.reshape(self.num_kv_heads, -1, states.shape[-1])

    def put(self, run: Run, found: Tensor, states: Tensor) -> None:
        """The way back from `queries`."""
        places = slice(run.queries.start - self.plan.start, run.queries.stop - self.plan.start)
        target = states[places].unflatten(1, (self.num_kv_heads, -1)).transpose(0, 1)
        target.copy_(found.view(target.shape))

    def keys(self, run: Run, states: Tensor) -> Tensor:
        """[kv_heads, keys, head_dim] of [tokens, kv_heads * head_dim]."""
        found = states[run.keys] if isinstance(run.keys, slice) else states.index_select(0, run.keys)
        return found.unflatten(1, (self.num_kv_heads, -1)).transpose(0, 1)

    def weights(self, run: Run, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor | None]:
        """Attention weights [kv_heads, queries * shared, keys], and the capped scores' slope where there is a cap."""
        scores, slope = queries @ keys.transpose(1, 2), None
        if self.softcap is not None:
            share = (scores / self.softcap).tanh_()
            scores, slope = share * self.softcap, 1 - share.square()
        mask = self.plan.mask(run, scores.dtype)
        scores.view(len(scores), len(mask), -1, run.num_keys)[..., run.masked_from :].add_(mask)
        return scores.softmax(-1), slope


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, kind: _Kind) -> Tensor:
        keys, values = key, value
        if kind.carried is not None:
            keys, values = kind.carried.extend(kind.layer, kind.plan.start, key, value)
        out = torch.empty_like(query)
        kept: list[Tensor] = []
        for run in kind.runs:
            weights, _ = kind.weights(run, kind.queries(run, query) * kind.scale, kind.keys(run, keys))
            kind.put(run, weights @ kind.keys(run, values), out)
            if kind.keeps_weights and any(ctx.needs_input_grad):
                kept.append(weights)
        ctx.save_for_backward(query, keys, values, *kept)
        ctx.kind = kind
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, keys, values, *kept = ctx.saved_tensors
        kind: _Kind = ctx.kind
        grad_query = torch.empty_like(query)
        if kind.carried is not None:
            grad_keys, grad_values = kind.carried.gradients(kind.layer)
        else:
            wide = torch.promote_types(keys.dtype, torch.float32)
            grad_keys, grad_values = (torch.zeros_like(keys, dtype=wide) for _ in range(2))
        for index, run in enumerate(kind.runs):
            queries, key = kind.queries(run, query) * kind.scale, kind.keys(run, keys)
            weights, slope = (kept[index], None) if kept else kind.weights(run, queries, key)
            grad = kind.queries(run, grads[0])
            _add(run, grad_values, weights.transpose(1, 2) @ grad)
            step = grad @ kind.keys(run, values).transpose(1, 2)
            step = torch.ops.aten._softmax_backward_data(step, weights, -1, step.dtype)
            if slope is not None:
                step *= slope
            kind.put(run, (step @ key).mul_(kind.scale), grad_query)
            _add(run, grad_keys, step.transpose(1, 2) @ queries)
        own = slice(kind.plan.start, kind.plan.stop) if kind.carried is not None else slice(None)
        return grad_query, grad_keys[own].to(keys.dtype), grad_values[own].to(keys.dtype), None


def _add(run: Run, total: Tensor, part: Tensor) -> None:
    """Adds [kv_heads, keys, head_dim] to the run's places of [tokens, kv_heads * head_dim]."""
    flat = part.transpose(0, 1).flatten(1)
    if isinstance(run.keys, slice):
        total[run.keys] += flat
    else:
        total.index_add_(0, run.keys, flat.to(total.dtype))


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_plan: AttentionPlan,
    carried: CarriedKeys | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """[1, heads, tokens, head_dim] queries to [1, tokens, heads, head_dim] outputs."""
    device, num_heads, num_kv_heads = query.device.type, query.shape[1], key.shape[1]
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    query, key, value = (states.to(dtype) for states in (query, key, value))
    if device == "cuda" and carried is None and query.shape[3] >= MIN_HEAD_DIM:
        out = flex_tree_attention(
            compiled_kernel(), query, key, value, tree_plan, scale=scale, window=sliding_window, softcap=softcap
        )
        return out.transpose(1, 2), None
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    kind = _Kind(
        plan=tree_plan,
        window=sliding_window,
        num_kv_heads=num_kv_heads,
        scale=scale,
        softcap=softcap,
        layer=getattr(module, "layer_idx", 0),
        carried=carried,
        keeps_weights=softcap is None
        and num_heads * tree_plan.num_pairs(sliding_window) <= KEPT_PER_TOKEN * tree_plan.num_tokens,
    )
    with torch.autocast(device, enabled=False):
        out: Tensor = _TreeAttention.apply(queries, keys.flatten(1), values.flatten(1), kind)  # type: ignore[assignment]
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, tree_attention)

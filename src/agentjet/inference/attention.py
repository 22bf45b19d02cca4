"""Attention of one engine step: tokens of many requests in one flat row, keys and values in per-request cache rows.

Invariants:

- A step's new keys and values are written to the cache first; a token then attends to the positions 0 to its own in its
  request's row, and to nothing else. What a row holds beyond that is finite and masked.
- Requests with few new tokens (decoding, the next turn of an episode) share one padded batch; longer prefills are
  computed one by one, unpadded.
- The linear layers around this never see padding of sequences, only the flat row.

Transformers calls `attend` through its attention interface. Under an implementation name that it knows no mask for, it
builds none; with its own it would take the falling position ids of the flat row for packed sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

IMPLEMENTATION = "agentjet_rows"
SHORT_TOKENS = 32
"""Requests with at most this many new tokens are batched."""
_LENGTH_STEP = 32
"""Cache lengths are rounded up to this, so that kernels meet few shapes (a new one costs 0.4 ms on CPU)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive new tokens of one request, as they lie in the flat row."""

    row: int
    """Cache row."""
    start: int
    """Position of the first new token in its sequence."""
    length: int


@dataclass(slots=True)
class _Batch:
    """Chunks of at most `width` tokens that are attended together."""

    tokens: slice | Tensor
    """Flat places [batch, width] of the tokens, padded with the first one; a slice when the width is 1."""
    real: Tensor | None
    """Which entries of `tokens` are not padding [batch x width]; None when all are."""
    rows: slice | Tensor
    """Cache rows; a slice takes all rows up to the last in use, without a copy."""
    places: Tensor | None
    """For a slice of rows: which of them each chunk has [batch]; None when they are the chunks in order."""
    width: int
    num_rows: int
    length: int
    mask: Tensor
    """Added to the scores [num_rows, 1, width, length]."""


@dataclass(slots=True)
class _Single:
    """One longer chunk."""

    tokens: slice
    row: int
    length: int
    mask: Tensor
    """Added to the scores [tokens, length]."""


@dataclass(slots=True)
class StepPlan:
    """Where a step's tokens lie, and what each may see."""

    keys: Sequence[Tensor]
    """Per layer [rows, kv_heads, length, head_dim]."""
    values: Sequence[Tensor]
    token_rows: Tensor
    token_positions: Tensor
    batches: list[_Batch] = field(default_factory=list)
    singles: list[_Single] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Real tokens; the flat row may be longer by padding at its end."""
        return self.token_rows.shape[0]


def plan_step(keys: Sequence[Tensor], values: Sequence[Tensor], chunks: Sequence[Chunk]) -> StepPlan:
    """Plan for chunks in the order of the flat row: those of one token first, then short ones, then the others."""
    device, dtype = keys[0].device, keys[0].dtype
    rows = [chunk.row for chunk in chunks for _ in range(chunk.length)]
    positions = [position for chunk in chunks for position in range(chunk.start, chunk.start + chunk.length)]
    plan = StepPlan(keys, values, torch.tensor(rows, device=device), torch.tensor(positions, device=device))
    capacity = keys[0].shape[2]
    num_ones = sum(chunk.length == 1 for chunk in chunks)
    num_short = sum(chunk.length <= SHORT_TOKENS for chunk in chunks)
    if num_ones:
        plan.batches.append(_batch(chunks[:num_ones], 0, capacity, device, dtype))
    if num_short > num_ones:
        plan.batches.append(_batch(chunks[num_ones:num_short], num_ones, capacity, device, dtype))
    offset = sum(chunk.length for chunk in chunks[:num_short])
    for chunk in chunks[num_short:]:
        end = chunk.start + chunk.length
        mask = _mask(torch.arange(chunk.start, end, device=device), end, dtype)
        plan.singles.append(_Single(slice(offset, offset + chunk.length), chunk.row, end, mask))
        offset += chunk.length
    return plan


def _mask(positions: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """0 where a token at `positions` [...] may see, else a very negative finite number [..., length]."""
    hidden = torch.arange(length, device=positions.device) > positions.unsqueeze(-1)
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, torch.finfo(dtype).min)


def _batch(chunks: Sequence[Chunk], offset: int, capacity: int, device: torch.device, dtype: torch.dtype) -> _Batch:
    width = max(chunk.length for chunk in chunks)
    end = max(chunk.start + chunk.length for chunk in chunks)
    length = min(capacity, -(-end // _LENGTH_STEP) * _LENGTH_STEP)
    rows = torch.tensor([chunk.row for chunk in chunks], device=device)
    starts = torch.tensor([chunk.start for chunk in chunks], device=device)
    lengths = torch.tensor([chunk.length for chunk in chunks], device=device)
    steps = torch.arange(width, device=device)
    mask = _mask(starts[:, None] + steps, length, dtype).unsqueeze(1)
    tokens: slice | Tensor = slice(offset, offset + len(chunks))
    real = None
    if width > 1:
        firsts = offset + lengths.cumsum(0) - lengths
        inside = steps < lengths[:, None]
        tokens = torch.where(inside, firsts[:, None] + steps, firsts[:, None])
        real = inside.flatten()
    span = max(chunk.row for chunk in chunks) + 1
    # Reading all rows up to the last one is free of copies; it pays until half of them are idle.
    if width > 1 or span > 2 * len(chunks):
        return _Batch(tokens, real, rows, None, width, len(chunks), length, mask)
    if span == len(chunks) and bool((rows[1:] > rows[:-1]).all()):
        return _Batch(tokens, real, slice(0, span), None, width, span, length, mask)
    spread = mask.new_zeros(span, *mask.shape[1:])
    spread[rows] = mask
    return _Batch(tokens, real, slice(0, span), rows, width, span, length, spread)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    plan: StepPlan,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer.

    Args:
        module: The model's attention layer; its index picks the cache.
        query: [1, heads, tokens, head_dim].
        key: [1, kv_heads, tokens, head_dim], as `value`.
        value: See `key`.
        attention_mask: None; the plan has the masks.
        scaling: Factor of the scores.
        plan: The step's plan.

    Returns:
        [1, tokens, heads, head_dim] and no weights.
    """
    layer: Any = module.layer_idx
    keys, values, count = plan.keys[layer], plan.values[layer], plan.num_tokens
    keys[plan.token_rows, :, plan.token_positions] = key[0, :, :count].transpose(0, 1).to(keys.dtype)
    values[plan.token_rows, :, plan.token_positions] = value[0, :, :count].transpose(0, 1).to(values.dtype)
    queries = query[0].transpose(0, 1)
    out = torch.zeros_like(queries)
    wide = queries.to(keys.dtype)
    for batch in plan.batches:
        _attend_batch(batch, wide, keys, values, scaling, out)
    for single in plan.singles:
        _attend_single(single, wide, keys, values, scaling, out)
    return out.unsqueeze(0), None


def _attend_batch(batch: _Batch, queries: Tensor, keys: Tensor, values: Tensor, scaling: float, out: Tensor) -> None:
    heads, size = queries.shape[1:]
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    picked = queries[batch.tokens].view(-1, batch.width, kv_heads, group, size)
    # Query heads that share a key head become rows of one product.
    grouped = picked.permute(0, 2, 3, 1, 4).reshape(-1, kv_heads, group * batch.width, size)
    if batch.places is not None:
        spread = grouped.new_zeros(batch.num_rows, *grouped.shape[1:])
        spread[batch.places] = grouped
        grouped = spread
    if isinstance(batch.rows, slice):
        key, value = keys[batch.rows, :, : batch.length], values[batch.rows, :, : batch.length]
    else:
        key = keys[:, :, : batch.length].index_select(0, batch.rows)
        value = values[:, :, : batch.length].index_select(0, batch.rows)
    mask = batch.mask if batch.width == 1 else batch.mask.repeat(1, 1, group, 1)
    mixed = _mix(grouped, key, value, mask, scaling)
    if batch.places is not None:
        mixed = mixed[batch.places]
    if batch.width == 1:
        out[batch.tokens] = mixed.reshape(-1, heads, size).to(out.dtype)
        return
    flat = mixed.view(-1, kv_heads, group, batch.width, size).permute(0, 3, 1, 2, 4).reshape(-1, heads, size)
    assert isinstance(batch.tokens, Tensor) and batch.real is not None
    out[batch.tokens.flatten()[batch.real]] = flat[batch.real].to(out.dtype)


def _mix(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Attention of grouped queries [rows, kv_heads, queries, head_dim]."""
    if query.device.type != "cpu":
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    # On CPU the fused kernel is twice as slow for few queries.
    scores = torch.matmul(query * scaling, key.transpose(-1, -2)).add_(mask)
    return torch.matmul(torch.softmax(scores, -1), value)


def _attend_single(single: _Single, queries: Tensor, keys: Tensor, values: Tensor, scaling: float, out: Tensor) -> None:
    heads, size = queries.shape[1:]
    kv_heads = keys.shape[1]
    picked = queries[single.tokens].view(-1, kv_heads, heads // kv_heads, size)
    grouped = picked.permute(1, 2, 0, 3).reshape(1, kv_heads, -1, size)
    key, value = keys[single.row, :, : single.length], values[single.row, :, : single.length]
    mask = single.mask.repeat(heads // kv_heads, 1)[None, None]
    mixed = functional.scaled_dot_product_attention(grouped, key[None], value[None], attn_mask=mask, scale=scaling)
    flat = mixed.view(kv_heads, heads // kv_heads, -1, size).permute(2, 0, 1, 3).reshape(-1, heads, size)
    out[single.tokens] = flat.to(out.dtype)


AttentionInterface.register(IMPLEMENTATION, attend)

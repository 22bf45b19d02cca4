"""Keys and values of running and finished sequences, one cache row each, found again by their token ids.

Invariants:

- A row's first `num_computed` positions hold keys and values of exactly its ids under exactly its weights, and are
  found by requests of the same weights only.
- An active row belongs to one running request; an idle one is what a finished request left, kept until its place is
  needed (least recently used goes first). Only rows of the newest weights are left: nobody will ask for others.
- What was never written is zero, and `clear` makes everything so: masked positions must stay finite.
- Rows have one common length, which grows by doubling as sequences get longer; rows x length stays within the budget,
  so long sequences leave room for fewer rows.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_FIRST_LENGTH = 256
_WORTH_COPYING = 4


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes that the model and the settings fix."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    max_rows: int
    max_length: int
    budget_tokens: int
    """Positions of all rows together; at least `max_length`."""


class RowCache:
    """Cache rows of one model."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.newest = 0
        """Names the weights that requests from now on have."""
        self._clock = 0
        self._allocate(min(_FIRST_LENGTH, shape.max_length))

    def _allocate(self, length: int) -> None:
        """Empty rows; where there is no memory for them nothing has changed."""
        shape = self.shape
        num_rows = max(1, min(shape.max_rows, shape.budget_tokens // length))
        size = (shape.num_layers, 2, num_rows, shape.num_kv_heads, length, shape.head_dim)
        if shape.device.type == "cpu" and shape.dtype == torch.float32:
            # numpy asks the system for zeroed pages, which cost no memory until a row is used.
            self.store = torch.from_numpy(np.zeros(size, np.float32))
        else:
            self.store = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self.length, self.num_rows = length, num_rows
        self.keys: list[Tensor] = [self.store[layer, 0] for layer in range(shape.num_layers)]
        self.values: list[Tensor] = [self.store[layer, 1] for layer in range(shape.num_layers)]
        self._ids = np.full((self.num_rows, length), -1, np.int64)
        self.num_known = np.zeros(self.num_rows, np.int64)
        """Ids of the row that are known, computed or not yet."""
        self.num_computed = np.zeros(self.num_rows, np.int64)
        self.active = np.zeros(self.num_rows, bool)
        self._used = np.zeros(self.num_rows, np.int64)
        self._weights = np.zeros(self.num_rows, np.int64)

    @property
    def num_cached_tokens(self) -> int:
        """Positions that hold keys and values."""
        return int(self.num_computed.sum())

    def clear(self) -> None:
        """Forgets everything, active rows included: the weights have changed."""
        # Let go first: there may be no room for two stores.
        del self.store
        self.keys, self.values = [], []
        self._allocate(self.length)

    def begin(self, weights: int) -> None:
        """Requests have other weights from now on; active rows keep what they hold."""
        self.newest = weights
        self._empty(np.flatnonzero(~self.active & (self._weights != weights)))

    def _empty(self, rows: np.ndarray | int) -> None:
        self.num_known[rows] = self.num_computed[rows] = 0
        self._ids[rows] = -1

    def match(self, ids: np.ndarray, weights: int) -> tuple[int, int, int]:
        """Best row for a prompt, the tokens of it that are computed there, and the most that will soon be in some row.

        At least the last id of the prompt is left to compute, for its output is wanted.
        """
        width = min(len(ids) - 1, self.length)
        if width == 0:
            return 0, 0, 0
        differs = self._ids[:, :width] != ids[:width]
        common = np.where(differs.any(1), differs.argmax(1), width) * (self._weights == weights)
        computed = np.minimum(common, self.num_computed)
        # Of equal matches the row that holds nothing else is best: it can be taken over without a copy.
        row = int(np.lexsort((-np.arange(self.num_rows), -self.num_computed, ~self.active, computed))[-1])
        known = int(np.minimum(common, self.num_known)[self.active].max(initial=0))
        return row, int(computed[row]), known

    def acquire(self, ids: np.ndarray, source: int, matched: int, weights: int) -> int | None:
        """Activates a row for a prompt and fills it with the `matched` tokens of row `source`; None when all are taken.

        The prompt has to fit the rows (`grow` first).
        """
        target, is_useful = source, matched >= _WORTH_COPYING
        if self.active[source] or self.num_computed[source] > matched:
            idle = np.flatnonzero(~self.active)
            if not len(idle):
                return None
            others = idle[idle != source] if is_useful and len(idle) > 1 else idle
            target = int(others[self._used[others].argmin()])
        source, target = self._lowest(source, target)
        if not is_useful and target != source:
            matched = 0
        if target != source and matched:
            self.store[:, :, target, :, :matched] = self.store[:, :, source, :, :matched]
        self._ids[target] = -1
        self._ids[target, : len(ids)] = ids
        self.num_known[target] = len(ids)
        self.num_computed[target] = matched
        self.active[target] = True
        self._weights[target] = weights
        self._touch(target)
        return target

    def _lowest(self, source: int, target: int) -> tuple[int, int]:
        """Moves the target to the lowest idle row, so that running requests lie close together.

        Attention reads neighbouring rows in place; it would have to gather scattered ones in every layer of every step,
        which soon costs more than this one copy. What lay there goes to the target's old row.
        """
        low = int(np.flatnonzero(~self.active)[0])
        if low >= target:
            return source, target
        aside = int(self.num_computed[low])
        if target == source:
            length = int(self.num_computed[target])
            kept = self.store[:, :, target, :, :length].clone()
            self.store[:, :, target, :, :aside] = self.store[:, :, low, :, :aside]
            self.store[:, :, low, :, :length] = kept
            source = low
        else:
            self.store[:, :, target, :, :aside] = self.store[:, :, low, :, :aside]
        for table in (self._ids, self.num_known, self.num_computed, self._used, self._weights):
            table[[low, target]] = table[[target, low]]
        return source, low

    def append(self, row: int, token: int) -> None:
        """Notes a drawn id, which the next step computes."""
        self._ids[row, self.num_known[row]] = token
        self.num_known[row] += 1

    def release(self, row: int) -> None:
        """Leaves a row idle with what it has computed; with nothing when its weights are not the newest."""
        self.active[row] = False
        if self._weights[row] != self.newest:
            self._empty(row)
        self.num_known[row] = self.num_computed[row]
        self._ids[row, self.num_computed[row] :] = -1
        self._touch(row)

    def _touch(self, row: int) -> None:
        self._clock += 1
        self._used[row] = self._clock

    def rows_at(self, length: int) -> int:
        """Rows there will be once sequences of `length` tokens fit."""
        return max(1, min(self.shape.max_rows, self.shape.budget_tokens // self._rounded(length)))

    def _rounded(self, length: int) -> int:
        rounded = self.length
        while rounded < length:
            rounded *= 2
        return min(rounded, self.shape.max_length)

    def grow(self, length: int) -> dict[int, int]:
        """Makes the rows long enough; returns where each active row went.

        At most `rows_at(length)` rows may be active. Idle rows that find no room are forgotten, the oldest first.
        """
        if length <= self.length:
            return {int(row): int(row) for row in np.flatnonzero(self.active)}
        store, ids, known, computed = self.store, self._ids, self.num_known, self.num_computed
        active, used, weights = self.active, self._used, self._weights
        kept = np.lexsort((-used, ~active))[: self.rows_at(length)]
        old_length = self.length
        self._allocate(self._rounded(length))
        count = len(kept)
        self.store[:, :, :count, :, :old_length] = store[:, :, torch.from_numpy(kept).to(store.device)]
        self._ids[:count, :old_length] = ids[kept]
        self.num_known[:count], self.num_computed[:count] = known[kept], computed[kept]
        self.active[:count], self._used[:count] = active[kept], used[kept]
        self._weights[:count] = weights[kept]
        return {int(old): new for new, old in enumerate(kept) if active[old]}

"""Cuts a forest into runs of queries, and says which keys each run reads and what it may see of them.

Tokens stand in preorder, so those of a run see only the run and the ancestors of its first token: an ancestor, outside
the run, of any of its tokens is an ancestor of the first one as well. Subtrees are nested, so the first of these keys
are visible to the whole run, and a mask is needed from the first one on whose subtree ends within the run.

Invariants:

- A token sees itself and its ancestors, nothing else; windows count in depth, as in an unmerged row.
- The cut is the cheapest under a cost in query-key pairs; it depends on the forest's shape only, never on time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentjet.merging import Forest
from agentjet.merging.forest import Int64Array

RUN_TOKENS = 512
"""Longest run."""
GRID_TOKENS = 32
"""A segment is cut at multiples of this from its start."""
RUN_COST = 3000
"""What a run costs beside its products, in query-key pairs."""
KEY_COST = 16
"""What it costs to gather a key for a run, in query-key pairs."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive queries and the keys that they read together."""

    queries: slice
    keys: slice | Tensor
    """Positions in the forest: ancestors of the first query, then the queries themselves."""
    num_keys: int
    masked_from: int
    """Keys before this one are visible to every query."""
    window: int
    """0: none."""

    @property
    def num_queries(self) -> int:
        """Tokens of the run."""
        return self.queries.stop - self.queries.start


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The cut of a forest, or of a stretch of it."""

    forest: Forest
    start: int
    """Position of the first query."""
    stop: int
    """Position after the last query."""
    edges: tuple[int, ...]
    """Where runs of the whole forest begin, and its end."""
    ends: Int64Array
    """[tokens] position after the last descendant of each token."""
    device: torch.device
    block_masks: dict[int, Any] = field(default_factory=dict)
    """Of the fused kernel (`agentjet.training.flex`), by window."""
    _runs: dict[int, tuple[Run, ...]] = field(default_factory=dict)
    _masks: dict[tuple[int, int, torch.dtype], Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Queries."""
        return self.stop - self.start

    def stretch(self, start: int, stop: int) -> "AttentionPlan":
        """The plan of some of the queries. ValueError where a border is none between runs."""
        if start not in self.edges or stop not in self.edges:
            raise ValueError(f"no run begins at {start} or ends at {stop}")
        return replace(self, start=start, stop=stop, block_masks={}, _runs={}, _masks={})

    def runs(self, window: int | None = None) -> tuple[Run, ...]:
        """The runs under a window that counts depth."""
        # A window that no path is longer than masks nothing.
        window = 0 if window is None or window > self.forest.depths.max(initial=0) else window
        if window not in self._runs:
            edges = [edge for edge in self.edges if self.start <= edge <= self.stop]
            self._runs[window] = tuple(self._run(slice(start, stop), window) for start, stop in pairwise(edges))
        return self._runs[window]

    def mask(self, run: Run, dtype: torch.dtype) -> Tensor:
        """[queries, 1, keys from masked_from on] additive, 0 where visible; made once for all layers."""
        key = (run.queries.start, run.window, dtype)
        if key not in self._masks:
            queries = np.arange(run.queries.start, run.queries.stop)
            gap = depth_gap(self.forest, self.ends, queries, self._keys(run.queries, run.window)[run.masked_from :])
            is_visible = (gap >= 0) & (gap < run.window) if run.window else gap >= 0
            # The least number instead of -inf: it can be added to any score.
            mask = torch.zeros(is_visible.shape, dtype=dtype).masked_fill_(
                torch.from_numpy(~is_visible), torch.finfo(dtype).min
            )
            self._masks[key] = mask[:, None].to(self.device)
        return self._masks[key]

    def num_pairs(self, window: int | None = None) -> int:
        """Query-key pairs of a layer that are computed, hidden ones included."""
        return sum(run.num_queries * run.num_keys for run in self.runs(window))

    def _run(self, queries: slice, window: int) -> Run:
        keys = self._keys(queries, window)
        return Run(
            queries=queries,
            keys=slice(0, queries.stop) if len(keys) == queries.stop else torch.from_numpy(keys).to(self.device),
            num_keys=len(keys),
            masked_from=0 if window else int((self.ends[keys[keys < queries.start]] >= queries.stop).sum()),
            window=window,
        )

    def _keys(self, queries: slice, window: int) -> Int64Array:
        """Positions that any of the queries may see."""
        path = ancestors(self.forest, queries.start)
        if window:
            shallowest = int(self.forest.depths[queries].min())
            path = path[max(0, shallowest - window + 1) :]
        return np.concatenate([path, np.arange(queries.start, queries.stop)])


def plan_attention(forest: Forest, device: torch.device | str = "cpu", *, borders: Sequence[int] = ()) -> AttentionPlan:
    """The cheapest cut of a forest that has all `borders` among its own."""
    edges = _cheapest_cut(forest, np.array(sorted({0, *borders, forest.num_tokens}), np.int64))
    return AttentionPlan(forest, 0, forest.num_tokens, edges, subtree_ends(forest), torch.device(device))


def ancestors(forest: Forest, position: int) -> Int64Array:
    """Positions of the ancestors of a token, root first."""
    index = int(np.searchsorted(forest.starts, position, side="right")) - 1
    parts = [np.arange(forest.starts[index], position)]
    while (index := forest.segments[index].parent) >= 0:
        parts.append(forest.starts[index] + np.arange(len(forest.segments[index].ids)))
    return np.concatenate(parts[::-1])


def depth_gap(forest: Forest, ends: Int64Array, queries: Int64Array, keys: Int64Array) -> Int64Array:
    """[queries, keys] depth of the query less that of the key; -1 where the key is no ancestor."""
    # In preorder a token's subtree is one run: k is an ancestor of q, or q itself, when k <= q < end of k's subtree.
    is_ancestor = (keys[None] <= queries[:, None]) & (queries[:, None] < ends[keys][None])
    return np.where(is_ancestor, forest.depths[queries][:, None] - forest.depths[keys][None], -1)


def subtree_ends(forest: Forest) -> Int64Array:
    """[tokens] position after the last descendant of each token."""
    lengths = [len(segment.ids) for segment in forest.segments]
    ends = [int(start) + length for start, length in zip(forest.starts, lengths, strict=True)]
    for index in range(len(ends) - 1, -1, -1):
        parent = forest.segments[index].parent
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[index])
    return np.repeat(np.array(ends, np.int64), lengths)


def _cheapest_cut(forest: Forest, borders: Int64Array) -> tuple[int, ...]:
    """Edges of the runs, by a dynamic program over the places where a run may begin."""
    places = np.union1d(_places(forest), borders)
    depths = forest.depths[places[:-1]]
    cost = np.full(len(places), np.inf)
    cost[-1] = 0.0
    following = np.zeros(len(places), np.int64)
    limits = np.searchsorted(places, places + RUN_TOKENS, side="right")
    walls = np.searchsorted(places, borders[np.searchsorted(borders, places[:-1], side="right")])
    for index in range(len(places) - 2, -1, -1):
        # The next place is always in reach, however long the run.
        stop = min(max(int(limits[index]), index + 2), int(walls[index]) + 1)
        lengths = places[index + 1 : stop] - places[index]
        num_keys = depths[index] + lengths
        is_gathered = num_keys != places[index + 1 : stop]
        total = lengths * num_keys + RUN_COST + KEY_COST * num_keys * is_gathered + cost[index + 1 : stop]
        best = int(np.argmin(total))
        cost[index], following[index] = total[best], index + 1 + best
    edges = [0]
    while edges[-1] < len(places) - 1:
        edges.append(int(following[edges[-1]]))
    return tuple(int(places[edge]) for edge in edges)


def _places(forest: Forest) -> npt.NDArray[np.int64]:
    """Where a run may begin."""
    grids = [
        np.arange(start, start + len(segment.ids), GRID_TOKENS)
        for start, segment in zip(forest.starts, forest.segments, strict=True)
    ]
    return np.concatenate([*grids, [forest.num_tokens]]).astype(np.int64)

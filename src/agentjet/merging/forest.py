"""Several samples as one forest: each unique token once, whatever samples it belongs to.

Invariants:

- Exact: a token of the forest has the same ancestors, in the same order, as in every sample that holds it.
- Terms keep the order of the samples and, within each, the sample's own order.
- Tokens stand in preorder: every ancestor of a token comes before it, a segment is one run.

It does not know advantages, packs or tensors of a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentjet.errors import MergeError
from agentjet.merging.trie import TokenTrie, ancestry, leaf_paths
from agentjet.schemas.sample import Sample, Segment

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Forest:
    """The joined samples, flat; positions count the forest's tokens in preorder."""

    segments: tuple[Segment, ...]
    starts: Int64Array
    """[segments] position of each segment's first token."""
    ids: Int64Array
    """[tokens]"""
    depths: Int64Array
    """[tokens] number of ancestors: the position of the token in its own row."""
    term_sample: Int64Array
    """[terms] index of the term's sample among those that were joined."""
    term_target: Int64Array
    """[terms] position of the sampled token."""
    term_predictor: Int64Array
    """[terms] position of the token before it on its path, where it is predicted."""

    @property
    def num_tokens(self) -> int:
        """Unique tokens."""
        return len(self.ids)


def plant(samples: Sequence[Sample]) -> Forest:
    """Joins samples into one forest. MergeError when a term has no token before it."""
    trie = TokenTrie()
    for sample in samples:
        for path in leaf_paths(sample.segments):
            trie.insert(path)
    segments = trie.segments()
    lengths = np.array([len(segment.ids) for segment in segments], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    base, predecessors = _depths(segments, starts)
    targets = [_targets(sample, trie, starts) for sample in samples]
    target = np.concatenate([np.empty(0, np.int64), *targets])
    predictor = predecessors[target]
    if (predictor < 0).any():
        raise MergeError("a sampled token opens its sequence, so nothing predicts it; merge with its prompt")
    return Forest(
        segments=segments,
        starts=starts,
        ids=np.fromiter((token for segment in segments for token in segment.ids), np.int64),
        depths=np.repeat(base - starts, lengths) + np.arange(int(lengths.sum())),
        term_sample=np.repeat(np.arange(len(samples)), [len(found) for found in targets]),
        term_target=target,
        term_predictor=predictor,
    )


def _depths(segments: Sequence[Segment], starts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Depth of each segment's first token, and the position before each token on its path (-1 at a root)."""
    base = np.zeros(len(segments), np.int64)
    num_tokens = sum(len(segment.ids) for segment in segments)
    predecessors = np.arange(-1, num_tokens - 1, dtype=np.int64)
    for index, segment in enumerate(segments):
        if segment.parent < 0:
            predecessors[starts[index]] = -1
            continue
        parent_length = len(segments[segment.parent].ids)
        base[index] = base[segment.parent] + parent_length
        predecessors[starts[index]] = starts[segment.parent] + parent_length - 1
    return base, predecessors


def _targets(sample: Sample, trie: TokenTrie, starts: Int64Array) -> Int64Array:
    """[terms of the sample] position of each sampled token in the forest."""
    positions: list[Int64Array] = [np.empty(0, np.int64)] * len(sample.segments)
    inner = {segment.parent for segment in sample.segments}
    for index in (index for index in range(len(sample.segments)) if index not in inner):
        line = ancestry(sample.segments, index)
        ids = tuple(token for segment in line for token in sample.segments[segment].ids)
        places = np.array(trie.places(ids), dtype=np.int64).reshape(-1, 2)
        flat = starts[places[:, 0]] + places[:, 1]
        for segment in line:
            length = len(sample.segments[segment].ids)
            positions[segment], flat = flat[:length], flat[length:]
    found = [
        positions[segment][offset] for segment, offset in zip(sample.term_segment, sample.term_offset, strict=True)
    ]
    return np.array(found, dtype=np.int64)

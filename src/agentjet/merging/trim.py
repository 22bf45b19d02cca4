"""Cuts a sample's branches to a length, and keeps what the episode ended with.

A branch longer than the limit keeps its tokens above it. Its *final action*, the sampled tokens at its end, would go
with the rest; it becomes a branch of its own, behind as many of the tokens before it as fit.

Invariants:

- A term above the limit keeps its context; only a final action is computed with a shortened one.
- What goes, and what has a shortened context, is counted, never silent.
- No branch of the result is longer than the limit.
"""

from dataclasses import dataclass
from itertools import pairwise

from agentjet.merging.trie import ancestry
from agentjet.schemas.sample import Sample, SampledCall, Segment

_Place = tuple[int, int]
"""(segment, offset) of a token."""


@dataclass(frozen=True, slots=True)
class Trimmed:
    """A sample within the limit."""

    sample: Sample
    num_lost: int = 0
    """Terms that are no longer there."""
    num_shortened: int = 0
    """Terms of final actions that stayed without all of their context."""


def trim(sample: Sample, max_tokens: int) -> Trimmed:
    """The sample with no branch above `max_tokens`; 0 has no limit. One within the limit is untouched."""
    lengths = _kept_lengths(sample.segments, max_tokens)
    if max_tokens == 0 or all(n == len(one.ids) for n, one in zip(lengths, sample.segments, strict=True)):
        return Trimmed(sample)
    names = {old: new for new, old in enumerate(index for index, length in enumerate(lengths) if length)}
    segments = [
        Segment(parent=names.get(sample.segments[old].parent, -1), ids=sample.segments[old].ids[: lengths[old]])
        for old in names
    ]
    moved = _final_actions(sample, max_tokens, segments)
    terms = list(zip(sample.term_segment, sample.term_offset, sample.term_logprob, strict=True))
    edges = [0]
    for call in sample.calls:
        edges.append(edges[-1] + call.num_terms)
    calls: list[SampledCall] = []
    kept: list[tuple[_Place, float]] = []
    num_shortened = 0
    for call, (start, stop) in zip(sample.calls, pairwise(edges), strict=True):
        before = len(kept)
        for index in range(start, stop):
            segment, offset, logprob = terms[index]
            if offset < lengths[segment]:
                kept.append(((names[segment], offset), logprob))
            elif index in moved:
                kept.append((moved[index], logprob))
                num_shortened += 1
        calls.append(call.model_copy(update={"num_terms": len(kept) - before}))
    fields = {
        "segments": tuple(segments),
        "calls": tuple(calls),
        "term_segment": tuple(segment for (segment, _), _ in kept),
        "term_offset": tuple(offset for (_, offset), _ in kept),
        "term_logprob": tuple(logprob for _, logprob in kept),
    }
    return Trimmed(sample.model_copy(update=fields), len(terms) - len(kept), num_shortened)


def _final_actions(sample: Sample, max_tokens: int, segments: list[Segment]) -> dict[int, _Place]:
    """Adds a segment for the end of each branch that was cut; places there of the terms that it keeps, by index."""
    by_segment: dict[int, list[int]] = {}
    for index, segment in enumerate(sample.term_segment):
        by_segment.setdefault(segment, []).append(index)
    owner = [place for place, call in enumerate(sample.calls) for _ in range(call.num_terms)]
    inner = {segment.parent for segment in sample.segments}
    moved: dict[int, _Place] = {}
    for leaf in (index for index in range(len(sample.segments)) if index not in inner):
        line = ancestry(sample.segments, leaf)
        bases, path = dict[int, int](), list[int]()
        for segment in line:
            bases[segment] = len(path)
            path += sample.segments[segment].ids
        depths = {index: bases[one] + sample.term_offset[index] for one in line for index in by_segment.get(one, ())}
        end = max(depths.values(), default=-1) + 1
        if end <= max_tokens:
            continue
        final = {owner[index] for index, depth in depths.items() if depth == end - 1}
        start = end - max_tokens
        # The first token of the new branch has nothing before it that could predict it.
        wanted = {
            index: (len(segments), depth - start)
            for index, depth in depths.items()
            if owner[index] in final and depth > start and depth >= max_tokens
        }
        if wanted.keys() - moved.keys():
            segments.append(Segment(parent=-1, ids=tuple(path[start:end])))
            moved = wanted | moved
    return moved


def _kept_lengths(segments: tuple[Segment, ...], max_tokens: int) -> list[int]:
    """[segments] how many of its tokens stand above the limit."""
    ends: list[int] = []
    lengths: list[int] = []
    for segment in segments:
        base = ends[segment.parent] if segment.parent >= 0 else 0
        ends.append(base + len(segment.ids))
        lengths.append(min(len(segment.ids), max(0, max_tokens - base)))
    return lengths

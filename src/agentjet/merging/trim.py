"""Cuts a sample's branches at a depth.

Invariant: a term that stays keeps its context; what goes is counted, never silent.
"""

from agentjet.schemas.sample import Sample, SampledCall, Segment


def trim(sample: Sample, max_tokens: int) -> tuple[Sample, int]:
    """The sample without tokens at depth `max_tokens` and beyond, and how many terms that cost.

    A branch within the limit is untouched; 0 has no limit.
    """
    lengths = _kept_lengths(sample.segments, max_tokens)
    if max_tokens == 0 or all(n == len(one.ids) for n, one in zip(lengths, sample.segments, strict=True)):
        return sample, 0
    places = {old: new for new, old in enumerate(index for index, length in enumerate(lengths) if length)}
    segments = tuple(
        Segment(parent=places.get(sample.segments[old].parent, -1), ids=sample.segments[old].ids[: lengths[old]])
        for old in places
    )
    terms = list(zip(sample.term_segment, sample.term_offset, sample.term_logprob, strict=True))
    calls: list[SampledCall] = []
    kept: list[tuple[int, int, float]] = []
    start = 0
    for call in sample.calls:
        own = [term for term in terms[start : start + call.num_terms] if term[1] < lengths[term[0]]]
        calls.append(call.model_copy(update={"num_terms": len(own)}))
        kept += own
        start += call.num_terms
    fields = {
        "segments": segments,
        "calls": tuple(calls),
        "term_segment": tuple(places[segment] for segment, _, _ in kept),
        "term_offset": tuple(offset for _, offset, _ in kept),
        "term_logprob": tuple(logprob for _, _, logprob in kept),
    }
    return sample.model_copy(update=fields), len(terms) - len(kept)


def _kept_lengths(segments: tuple[Segment, ...], max_tokens: int) -> list[int]:
    """[segments] how many of its tokens stand above the limit."""
    ends: list[int] = []
    lengths: list[int] = []
    for segment in segments:
        base = ends[segment.parent] if segment.parent >= 0 else 0
        ends.append(base + len(segment.ids))
        lengths.append(min(len(segment.ids), max(0, max_tokens - base)))
    return lengths

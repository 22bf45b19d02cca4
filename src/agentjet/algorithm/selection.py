"""Which calls of a sample train: the terms of the others leave it, their tokens stay as context.

Invariants: the calls keep their number and order, so what is aligned with them stays so; a term that left counts in no
denominator; tokens that no term needs any more are not computed.
"""

from collections.abc import Sequence

from agentjet.schemas.sample import Sample, Segment


def keep_calls(sample: Sample, is_kept: Sequence[bool]) -> Sample:
    """The sample with the terms of some calls only.

    Args:
        sample: Untouched when every call is kept.
        is_kept: [calls]
    """
    if all(is_kept):
        return sample
    chosen = kept_terms(sample, is_kept)
    names = _needed(sample, {sample.term_segment[place] for place in chosen})
    segments = (sample.segments[old] for old in names)
    fields = {
        "segments": tuple(Segment(parent=names.get(one.parent, -1), ids=one.ids) for one in segments),
        "calls": tuple(
            call if kept else call.model_copy(update={"num_terms": 0})
            for call, kept in zip(sample.calls, is_kept, strict=True)
        ),
        "term_segment": tuple(names[sample.term_segment[place]] for place in chosen),
        "term_offset": tuple(sample.term_offset[place] for place in chosen),
        "term_logprob": tuple(sample.term_logprob[place] for place in chosen),
    }
    return sample.model_copy(update=fields)


def kept_terms(sample: Sample, is_kept: Sequence[bool]) -> list[int]:
    """Places of the terms of the calls that are kept."""
    owners = (kept for call, kept in zip(sample.calls, is_kept, strict=True) for _ in range(call.num_terms))
    return [place for place, kept in enumerate(owners) if kept]


def _needed(sample: Sample, ends: set[int]) -> dict[int, int]:
    """Old to new index of the segments that hold a term or lead to one."""
    needed = set(ends)
    for index in reversed(range(len(sample.segments))):  # a parent comes before its children
        if index in needed:
            needed.add(sample.segments[index].parent)
    return {old: new for new, old in enumerate(sorted(needed - {-1}))}

"""Which tokens tell engine and learner apart: those drawn under the very weights that the learner holds.

Invariants: a token of other weights is never among them, not even of a call that an update cut in two, nor one that
rests on keys and values of older weights (`engine.keep_kv`); every engine that drew any gets its share of the samples.
A sample is computed whole, for its tokens need their context.

It does not know how log-probs are computed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentjet.schemas.sample import Sample

IsCurrent = Callable[[str], bool]
"""Whether a version names the learner's weights."""


@dataclass(frozen=True, slots=True)
class ComparedTerms:
    """Chosen samples and which of their terms are compared, in the samples' order."""

    samples: tuple[Sample, ...]
    place: Tensor
    """[compared] index among all terms of the samples."""
    engine: tuple[str, ...]
    """[compared]"""
    temperature: Tensor
    """[compared]"""
    sampled: Tensor
    """[compared] the engine's log-prob."""

    @property
    def engines(self) -> list[str]:
        """Those that drew any, by name."""
        return sorted(set(self.engine))

    def of(self, engine: str) -> Tensor:
        """[compared] whether an engine drew the term."""
        return torch.tensor([one == engine for one in self.engine])


@dataclass(frozen=True, slots=True)
class _Span:
    """A run of a sample's terms that one engine drew under one version."""

    engine: str
    version: str
    temperature: float
    start: int
    stop: int


def choose_terms(samples: Sequence[Sample], is_current: IsCurrent, num_tokens: int, *, least: int = 1) -> ComparedTerms:
    """The terms to compare: those of the first samples that bring every engine to its share of `num_tokens`.

    However many engines there are, each gets `least` tokens where it drew that many.
    """
    spans = {place: list(_spans(sample, is_current)) for place, sample in enumerate(samples)}
    engines = {span.engine for found in spans.values() for span in found}
    share = max(least, num_tokens / max(1, len(engines)))
    counts, chosen = Counter[str](), list[int]()
    for place, found in spans.items():
        if any(counts[span.engine] < share for span in found):
            chosen.append(place)
            for span in found:
                counts[span.engine] += span.stop - span.start
    return _gather([(samples[place], spans[place]) for place in chosen])


def _spans(sample: Sample, is_current: IsCurrent) -> Iterator[_Span]:
    first = 0
    for call in sample.calls:
        edges = [*call.version_starts[1:], call.num_terms]
        mixed = call.is_mixed or (False,) * len(edges)
        for version, is_mixed, start, stop in zip(call.versions, mixed, call.version_starts, edges, strict=False):
            if stop > start and not is_mixed and is_current(version):
                yield _Span(call.engine, version, call.temperature, first + start, first + stop)
        first += call.num_terms


def _gather(chosen: Sequence[tuple[Sample, Sequence[_Span]]]) -> ComparedTerms:
    places, engines, temperatures, sampled = list[int](), list[str](), list[float](), list[float]()
    num_before = 0
    for sample, spans in chosen:
        for span in spans:
            length = span.stop - span.start
            places += range(num_before + span.start, num_before + span.stop)
            engines += [span.engine] * length
            temperatures += [span.temperature] * length
            sampled += sample.term_logprob[span.start : span.stop]
        num_before += len(sample.term_logprob)
    return ComparedTerms(
        samples=tuple(sample for sample, _ in chosen),
        place=torch.tensor(places, dtype=torch.long),
        engine=tuple(engines),
        temperature=torch.tensor(temperatures, dtype=torch.float64),
        sampled=torch.tensor(sampled, dtype=torch.float64),
    )

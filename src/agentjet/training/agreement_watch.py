"""Engines beside the learner: their log-probs of the same tokens under the same weights, looked at every so often.

Invariants:

- Only reads: a step with a comparison before it does the same as one without.
- An engine is judged by its own tokens, so one bad engine of several is named; what it was found to do stands until
  there are tokens enough to judge it again, or it has drawn none in several comparisons and counts as gone.
- Where no token of the learner's own weights is at hand (a run that is far off-policy) nothing is compared, the next
  step tries again, and `agreement_step` tells since when.

It does not know the bus, or how log-probs are computed.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from agentjet.algorithm.agreement import Agreement, agreement
from agentjet.config import AgreementSettings
from agentjet.schemas.sample import Sample
from agentjet.training.compared_term import ComparedTerms, IsCurrent, choose_terms
from agentjet.training.mismatch import MIN_TOKENS, Bounds, Reading, find_cause

_GONE_COMPARISONS = 3


class Scorer(Protocol):
    """What reads the tokens again: a `Trainer`."""

    @property
    def engine_dtype(self) -> torch.dtype:
        """In which the engines are taken to compute."""
        ...

    def logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """[samples][terms] log-probs under the weights of now."""
        ...


class AgreementWatch:
    """Compares the engines of one model with its learner.

    Args:
        model: Its name, for what is said to people.
        settings: How often, on how much, and the bounds.
        scorer: The learner's side.
    """

    def __init__(self, model: str, settings: AgreementSettings, scorer: Scorer) -> None:
        self._model, self._settings, self._scorer = model, settings, scorer
        self._bounds = Bounds.of(settings, scorer.engine_dtype)
        self._last_step: int | None = None
        self._figures: dict[str, float] = {}
        self._agreed: set[str] = set()
        self._problems: dict[str, str] = {}
        self._num_absent: dict[str, int] = {}
        """Comparisons since an engine with a problem drew a token."""

    def is_due(self, step: int) -> bool:
        """Whether engines are to be compared before the step that follows `step` others."""
        if not self._settings.every_steps:
            return False
        is_late = self._last_step is None or step - self._last_step >= self._settings.every_steps
        return is_late or bool(self._problems)

    def compare(self, samples: Sequence[Sample], step: int, is_current: IsCurrent) -> dict[str, float]:
        """The figures over all engines; empty where no token can be compared.

        Args:
            samples: To choose from.
            step: Steps that the learner's weights hold.
            is_current: Whether a version names these weights.
        """
        terms = choose_terms(samples, is_current, self._settings.num_tokens, least=MIN_TOKENS)
        if not len(terms.place):
            return {}
        logprob = self._read(terms.samples, terms)
        for engine in terms.engines:
            self._judge(engine, terms, logprob, step)
        self._forget_gone(terms.engines)
        self._last_step = step
        self._figures = agreement(logprob, terms.sampled).figures()
        return dict(self._figures)

    def metrics(self) -> dict[str, float]:
        """The newest figures, and the step before which they were taken."""
        return {} if self._last_step is None else {**self._figures, "agreement_step": float(self._last_step)}

    def problems(self) -> list[str]:
        """A sentence for each engine that disagrees."""
        return [self._problems[engine] for engine in sorted(self._problems)]

    def _read(self, samples: Sequence[Sample], terms: ComparedTerms) -> Tensor:
        """[compared] the learner's log-probs, in float64 on the CPU."""
        return torch.cat([found.double().cpu() for found in self._scorer.logprobs(samples)])[terms.place]

    def _judge(self, engine: str, terms: ComparedTerms, logprob: Tensor, step: int) -> None:
        is_own = terms.of(engine)
        found = agreement(logprob[is_own], terms.sampled[is_own])
        if found.num_tokens < MIN_TOKENS:
            return
        broken = self._bounds.broken_by(found)
        self._problems.pop(engine, None)
        if not broken:
            self._agreed.add(engine)
            return
        cold = self._read([_at_temperature_one(sample) for sample in terms.samples], terms)
        reading = Reading(terms.sampled[is_own], cold[is_own], terms.temperature[is_own])
        cause = find_cause(
            reading, found, self._bounds, dtype=self._scorer.engine_dtype, has_agreed=engine in self._agreed
        )
        self._problems[engine] = self._sentence(engine, found, broken, cause.value, step)

    def _forget_gone(self, present: Sequence[str]) -> None:
        """An engine that was started again has another name: nothing else would end its alarm."""
        self._num_absent = {
            engine: 0 if engine in present else self._num_absent.get(engine, 0) + 1 for engine in self._problems
        }
        for engine, num_absent in self._num_absent.items():
            if num_absent >= _GONE_COMPARISONS:
                del self._problems[engine]

    def _sentence(self, engine: str, found: Agreement, broken: str, cause: str, step: int) -> str:
        who = f"engine {engine}" if engine else "an engine"
        return (
            f"{who} and the learner of model {self._model} disagree on {found.num_tokens} tokens of the weights of "
            f"step {step}: log-probs differ by {broken}; {cause.replace('NAME', self._model)}"
        )


def _at_temperature_one(sample: Sample) -> Sample:
    calls = tuple(call.model_copy(update={"temperature": 1.0}) for call in sample.calls)
    return sample.model_copy(update={"calls": calls})

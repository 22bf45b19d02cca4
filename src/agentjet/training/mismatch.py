"""When an engine and the learner disagree too much, and why they most likely do.

Invariants: bounds lie well above what was measured of engines that are right; a cause that can be computed is computed
(the learner reads the same tokens as an engine with that fault would) before one is guessed from the engine's past.

It does not know samples or the bus.
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from agentjet.algorithm.agreement import Agreement, agreement
from agentjet.config import AgreementSettings

MIN_TOKENS = 64
"""Fewer are compared and not judged: a mean over them is chance."""
_P999_TOKENS = 1000
"""From as many on the 99.9th percentile is not just the largest."""
_BOUNDS = {torch.bfloat16: (0.06, 0.6, float("inf")), torch.float32: (2e-4, 2e-3, 2e-3)}
"""Mean, 99.9th percentile and largest difference in nats by the engine's dtype: twice those of case L1.

Measured with SmolLM2-135M at temperatures 1 and 0.6, engine and learner in the same dtype: float32 5.6e-6, 4.5e-5 and
5.3e-5 over 2,048 tokens; bfloat16 0.015 and 0.28 over 2,560. Weights older by one step of 1e-6: a mean of 0.006.
"""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Differences up to which engine and learner agree, in nats."""

    mean_nats: float
    p999_nats: float
    max_nats: float

    @classmethod
    def of(cls, settings: AgreementSettings, dtype: torch.dtype) -> "Bounds":
        """Those that are set; 0 takes that of the engine's dtype."""
        given = (settings.max_mean_nats, settings.max_p999_nats, settings.max_nats)
        usual = _BOUNDS.get(dtype, _BOUNDS[torch.bfloat16])
        return cls(*(one or other for one, other in zip(given, usual, strict=True)))

    def broken_by(self, found: Agreement) -> str:
        """The first figure that is above its bound, in words; empty when they agree or too little is known."""
        if found.num_tokens < MIN_TOKENS:
            return ""
        if found.mean_nats > self.mean_nats:
            return f"{found.mean_nats:.2g} nats on average, above {self.mean_nats:g}"
        if found.num_tokens >= _P999_TOKENS and found.p999_nats > self.p999_nats:
            return f"{found.p999_nats:.2g} nats at the 99.9th percentile, above {self.p999_nats:g}"
        if found.max_nats > self.max_nats:
            return f"{found.max_nats:.2g} nats at one token, above {self.max_nats:g}"
        return ""


class Cause(Enum):
    """Why log-probs disagree; the value says what to do."""

    RAW = (
        "they are log-probs at temperature 1: the engine reports or draws without the call's temperature; set its "
        "log-prob mode to processed_logprobs"
    )
    """Computed."""
    DIVIDED = (
        "they are log-probs divided by the temperature: it is the logits that have to be divided, before the softmax"
    )
    """Computed."""
    STALE = (
        "it agreed before, so it most likely holds older weights than it says; look for failed loads in its log and "
        "restart it"
    )
    """Guessed."""
    BFLOAT16 = (
        "so far apart are bfloat16 and float32: the engine computes in bfloat16 where float32 is expected; set its "
        "dtype and models.NAME.engine.dtype alike"
    )
    """Guessed."""
    UNKNOWN = (
        "it is neither the temperature nor rounding; compare its model files and the version that it loaded last with "
        "the learner's"
    )
    """What is left."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One engine's compared tokens, as the learner reads them."""

    sampled: Tensor
    """[compared] the engine's log-probs."""
    cold: Tensor
    """[compared] the learner's at temperature 1."""
    temperature: Tensor
    """[compared]"""


def find_cause(reading: Reading, found: Agreement, bounds: Bounds, *, dtype: torch.dtype, has_agreed: bool) -> Cause:
    """The likeliest cause.

    Args:
        reading: The tokens that disagree.
        found: How far they do.
        bounds: Of the engine's dtype.
        dtype: In which the learner takes the engine to compute.
        has_agreed: Whether this engine agreed earlier.
    """
    is_warm = bool((reading.temperature != 1).any())
    if is_warm and not bounds.broken_by(agreement(reading.cold, reading.sampled)):
        return Cause.RAW
    if is_warm and not bounds.broken_by(agreement(reading.cold / reading.temperature, reading.sampled)):
        return Cause.DIVIDED
    if has_agreed:
        return Cause.STALE
    rounding = Bounds.of(AgreementSettings(), torch.bfloat16)
    if dtype == torch.float32 and not rounding.broken_by(found):
        return Cause.BFLOAT16
    return Cause.UNKNOWN

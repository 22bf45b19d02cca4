"""The comparison: each figure of both sides for every seed, and the median of the seeds' ratios."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trl_match.match import VALID, Step

RATES = ("trained_tokens_per_second",)
"""More is better."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Both sides with one seed."""

    trl: list[Step]
    agentjet: list[Step]

    @property
    def num_common(self) -> int:
        """Steps that both took."""
        return min(len(self.trl), len(self.agentjet))

    def figures(self, steps: list[Step]) -> dict[str, float | None]:
        """Of one side."""
        common, first = steps[: self.num_common], steps[0]
        reached = next((number for number, step in enumerate(steps) if step.valid_ratio >= VALID), None)
        last = None if reached is None else steps[reached]
        return {
            "seconds_per_step": common[-1].seconds / len(common),
            "trained_tokens_per_second": sum(step.trained_tokens for step in common) / common[-1].seconds,
            "cpu_seconds_per_step": _slope([step.cpu_seconds for step in common]),
            "startup_seconds": first.whole_seconds - first.seconds,
            "updates_to_valid": None if reached is None else reached + 1.0,
            "seconds_to_valid": last and last.seconds,
            "whole_seconds_to_valid": last and last.whole_seconds,
            "cpu_seconds_to_valid": last and last.cpu_seconds,
        }


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Of one game: each figure of both sides for every seed, and the median of the ratios.

    A ratio is None while a side did not reach the aim in half of the seeds or more.
    """
    trl, ours = [pair.figures(pair.trl) for pair in pairs], [pair.figures(pair.agentjet) for pair in pairs]
    result: dict[str, Any] = {"common_steps": [pair.num_common for pair in pairs]}
    for name in trl[0]:
        sides = {"trl": [one[name] for one in trl], "agentjet": [one[name] for one in ours]}
        result[name] = {side: [_rounded(value) for value in values] for side, values in sides.items()}
        over, under = (sides["agentjet"], sides["trl"]) if name in RATES else (sides["trl"], sides["agentjet"])
        result[name]["ratio"] = _rounded(_median_ratio(over, under))
    result["valid_ratio_last"] = {
        "trl": [_rounded(pair.trl[-1].valid_ratio) for pair in pairs],
        "agentjet": [_rounded(pair.agentjet[-1].valid_ratio) for pair in pairs],
    }
    return result


def _median_ratio(over: Sequence[float | None], under: Sequence[float | None]) -> float | None:
    found = [a / b for a, b in zip(over, under, strict=True) if a is not None and b is not None]
    return statistics.median(found) if 2 * len(found) > len(over) else None


def _slope(values: Sequence[float]) -> float | None:
    """Mean growth from one value to the next."""
    return (values[-1] - values[0]) / (len(values) - 1) if len(values) > 1 else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)

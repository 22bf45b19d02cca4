"""Rewards of single calls, from the ways in which they may be given to one map by call.

Invariant: each model that is named at all has a finite reward for every one of its calls; a forgotten call is an error,
never a reward of 0.
"""

import math
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentjet.errors import CallRewardError


def rewards_by_call(given: Any, calls: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """The reward of each call; empty when none are given.

    Args:
        given: Numbers by call, or by the id of its completion (`chatcmpl-<call>`); or a sequence of numbers in the
            order of the calls, where only one model was called; or None.
        calls: The episode's answered calls for each model, in order.

    Raises:
        CallRewardError: They do not fit the calls.
    """
    if given is None:
        return {}
    called = {model: list(own) for model, own in calls.items() if own}
    if isinstance(given, Mapping):
        pairs = cast("Mapping[Any, Any]", given).items()
        found = {re.split("[-_]", str(name))[-1]: _finite(value, name) for name, value in pairs}
        _check_complete(found, called)
        return found
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise CallRewardError(f"call_rewards is a {type(given).__name__}; give numbers by call, or a list of them")
    if len(called) > 1:
        raise CallRewardError(
            f"call_rewards is a list, but the episode called {', '.join(sorted(called))}, and calls of several models "
            "have no common order; give numbers by call"
        )
    order, values = [call for own in called.values() for call in own], list(cast("Sequence[Any]", given))
    if len(values) != len(order):
        raise CallRewardError(f"call_rewards has {len(values)} numbers for {len(order)} calls; give one for each")
    return {call: _finite(value, place) for place, (call, value) in enumerate(zip(order, values, strict=True))}


def _check_complete(found: Mapping[str, float], called: Mapping[str, Sequence[str]]) -> None:
    known = {call for own in called.values() for call in own}
    strange = [call for call in found if call not in known]
    if strange:
        raise CallRewardError(f"call_rewards names {strange[0]}, which is no answered call of this episode")
    for model, own in called.items():
        missing = [call for call in own if call not in found]
        if missing and len(missing) < len(own):
            raise CallRewardError(
                f"call_rewards lacks {len(missing)} of the {len(own)} calls of {model}, {missing[0]} first; "
                "give each a number, 0 where it earned nothing"
            )


def _finite(value: Any, name: object) -> float:
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise CallRewardError(f"call_rewards[{name!r}] is {value!r:.100}, which is no finite number")
    return float(value)

"""Advantages of a batch's calls from rewards, of their episodes or their own.

Invariants: an invalid reward (None or not finite) takes part in nothing, never as 0; a baseline compares at least two
episodes, so nothing learns from a raw reward; where all that is compared is equal, the advantage is exactly 0.

It does not know tokens or tensors.
"""

import math
from collections.abc import Sequence

from typing_extensions import TypeIs

from agentjet.config import AlgorithmSettings
from agentjet.schemas.sample import Sample

WHITENED = frozenset({"reinforce++", "reinforce++_baseline"})
"""Advantages that are normalized over the whole batch."""


def batch_advantages(batch: Sequence[Sequence[Sample]], settings: AlgorithmSettings) -> list[list[list[float]]]:
    """[groups][samples][calls] the advantage of every call of a step.

    - `reinforce++`, `reinforce++_baseline`: (A - mean) / (std + epsilon) over every term of the batch, Hu et al.
      (arXiv:2501.03262); a batch of equal values gives exactly 0.
    - All others: a matter of each group alone.
    """
    found = [call_advantages(group, settings) for group in batch]
    if settings.advantage not in WHITENED:
        return [[[advantage or 0.0 for advantage in row] for row in rows] for rows in found]
    calls = [call for group in batch for sample in group for call in sample.calls]
    flat = [advantage for rows in found for row in rows for advantage in row]
    white = iter(_whitened(flat, [call.num_terms for call in calls], settings.std_epsilon))
    return [[[next(white) for _ in row] for row in rows] for rows in found]


def call_advantages(group: Sequence[Sample], settings: AlgorithmSettings) -> list[list[float | None]]:
    """[samples][calls] the advantage of every call of a group's samples, None where its reward is invalid.

    An agent with rewards of its own is compared with the same agent in the group's other episodes, so the baseline's
    key is (group, agent); all other calls share the episode's. With `credit = "call"`, and a reward of each call of
    each sample, neither plays a part: see `process_advantages`.
    """
    if settings.credit == "call" and has_call_rewards(group):
        return [list[float | None](row) for row in process_advantages(_call_rewards(group), settings)]
    shared = group_advantages([sample.reward for sample in group], settings)
    own = {
        agent: group_advantages(_agent_rewards(group, agent), settings)
        for sample in group
        for agent in sample.agent_rewards
    }
    return [
        [own[call.agent][index] if call.agent in own else shared[index] for call in sample.calls]
        for index, sample in enumerate(group)
    ]


def group_advantages(rewards: Sequence[float | None], settings: AlgorithmSettings) -> list[float | None]:
    """The advantage of each member; None where the reward is invalid.

    - `grpo`: (r - mean) / (std + epsilon), DeepSeekMath (arXiv:2402.03300) section 4.1.2.
    - `centred`: r - mean, Dr. GRPO (arXiv:2503.20783) equation 4; also what `reinforce++_baseline` whitens.
    - `rloo`: r - mean of the others, Ahmadian et al. (arXiv:2402.14740) equation 6.
    - `maxrl`: (r - mean) / mean, Tajwar et al. (arXiv:2602.02710) algorithm 1: rewards are measures of success, so a
      group without success, or with a reward below 0, teaches nothing.
    - `reinforce++`: r, to be whitened over the batch.
    """
    if settings.advantage == "reinforce++":
        return [reward if is_valid(reward) else None for reward in rewards]
    valid = [reward for reward in rewards if is_valid(reward)]
    scale = _scale(valid, settings) if has_signal(rewards) else 0.0
    if scale == 0:
        return [0.0 if is_valid(reward) else None for reward in rewards]
    mean = math.fsum(valid) / len(valid)
    return [(reward - mean) * scale if is_valid(reward) else None for reward in rewards]


def process_advantages(episodes: Sequence[Sequence[float]], settings: AlgorithmSettings) -> list[list[float]]:
    """[episodes][calls] the advantage of each call of a group, from the rewards of all of them.

    A call's reward is normalized among the rewards of all calls of the group, as an episode's is among its members; its
    advantage is the sum of the normalized rewards of itself and the calls after it, each next one discounted:
    process supervision, DeepSeekMath (arXiv:2402.03300) section 4.1.3, where a call is a step and `discount` is 1. With
    `reinforce++` they are summed raw, to be whitened over the batch.
    """
    if len(episodes) < 2 and settings.advantage != "reinforce++":
        return [[0.0] * len(row) for row in episodes]
    normalized = iter(group_advantages([reward for row in episodes for reward in row], settings))
    return [_returns([next(normalized) or 0.0 for _ in row], settings.discount) for row in episodes]


def _returns(rewards: Sequence[float], discount: float) -> list[float]:
    """[calls] each one's reward and the discounted rewards after it."""
    found = list(rewards)
    for place in reversed(range(len(found) - 1)):
        found[place] += discount * found[place + 1]
    return found


def _scale(valid: Sequence[float], settings: AlgorithmSettings) -> float:
    """What a reward's distance to the mean is multiplied by; 0 for a group that teaches nothing."""
    mean = math.fsum(valid) / len(valid)
    match settings.advantage:
        case "rloo":
            # r_i - (n * mean - r_i) / (n - 1)  =  (r_i - mean) * n / (n - 1)
            return len(valid) / (len(valid) - 1)
        case "grpo":
            freedom = len(valid) - 1 if settings.std == "sample" else len(valid)
            std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in valid) / freedom)
            return 1.0 / (std + settings.std_epsilon)
        case "maxrl":
            return 1.0 / mean if min(valid) >= 0 else 0.0
        case _:
            return 1.0


def _whitened(values: Sequence[float | None], counts: Sequence[int], epsilon: float) -> list[float]:
    """The values with mean 0 and standard deviation 1, each taken as often as it counts; 0 for None."""
    known = [(value, count) for value, count in zip(values, counts, strict=True) if value is not None and count]
    if not has_signal([value for value, _ in known]):
        return [0.0] * len(values)
    total = sum(count for _, count in known)
    mean = math.fsum(value * count for value, count in known) / total
    std = math.sqrt(math.fsum((value - mean) ** 2 * count for value, count in known) / total)
    return [0.0 if value is None else (value - mean) / (std + epsilon) for value in values]


def has_signal(rewards: Sequence[float | None]) -> bool:
    """Whether two valid rewards differ; a constant group has a zero gradient."""
    valid = [reward for reward in rewards if is_valid(reward)]
    return len(valid) >= 2 and min(valid) < max(valid)


def group_has_signal(group: Sequence[Sample], settings: AlgorithmSettings) -> bool:
    """Whether any baseline of the group, its agents' own ones included, tells its episodes, or calls, apart."""
    if settings.credit == "call" and has_call_rewards(group):
        return len(group) >= 2 and has_signal([reward for row in _call_rewards(group) for reward in row])
    agents = {agent for sample in group for agent in sample.agent_rewards}
    return has_signal([sample.reward for sample in group]) or any(
        has_signal(_agent_rewards(group, agent)) for agent in agents
    )


def has_call_rewards(group: Sequence[Sample]) -> bool:
    """Whether each call of each sample has a reward of its own."""
    return all(is_valid(call.reward) for sample in group for call in sample.calls)


def is_valid(reward: float | None) -> TypeIs[float]:
    """Whether a reward may be learnt from."""
    return reward is not None and math.isfinite(reward)


def _call_rewards(group: Sequence[Sample]) -> list[list[float]]:
    return [[call.reward for call in sample.calls if is_valid(call.reward)] for sample in group]


def _agent_rewards(group: Sequence[Sample], agent: str) -> list[float | None]:
    return [
        sample.agent_rewards.get(agent, sample.reward) if any(call.agent == agent for call in sample.calls) else None
        for sample in group
    ]

"""Advantages of a group's episodes from their rewards.

Invariants: an invalid reward (None or not finite) takes part in nothing, never as 0; a baseline compares at least two
episodes, so a group of one has advantage 0; equal rewards give exactly 0.

It does not know tokens or tensors.
"""

import math
from collections.abc import Sequence

from typing_extensions import TypeIs

from agentjet.config import AlgorithmSettings
from agentjet.schemas.sample import Sample


def group_advantages(rewards: Sequence[float | None], settings: AlgorithmSettings) -> list[float | None]:
    """The advantage of each member; None where the reward is invalid.

    - `grpo`: (r - mean) / (std + epsilon), DeepSeekMath (arXiv:2402.03300) section 4.1.2.
    - `centred`: r - mean, Dr. GRPO (arXiv:2503.20783) equation 4.
    - `rloo`: r - mean of the others, Ahmadian et al. (arXiv:2402.14740) equation 6.
    """
    valid = [reward for reward in rewards if is_valid(reward)]
    if not has_signal(rewards):
        return [0.0 if is_valid(reward) else None for reward in rewards]
    mean = math.fsum(valid) / len(valid)
    scale = 1.0
    if settings.advantage == "rloo":
        # r_i - (n * mean - r_i) / (n - 1)  =  (r_i - mean) * n / (n - 1)
        scale = len(valid) / (len(valid) - 1)
    elif settings.advantage == "grpo":
        freedom = len(valid) - 1 if settings.std == "sample" else len(valid)
        std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in valid) / freedom)
        scale = 1.0 / (std + settings.std_epsilon)
    return [(reward - mean) * scale if is_valid(reward) else None for reward in rewards]


def call_advantages(group: Sequence[Sample], settings: AlgorithmSettings) -> list[list[float]]:
    """[samples][calls] the advantage of every call of a group's samples.

    An agent with rewards of its own is compared with the same agent in the group's other episodes, so the baseline's
    key is (group, agent); all other calls share the episode's.
    """
    shared = _finite(group_advantages([sample.reward for sample in group], settings))
    own = {agent: _agent_advantages(group, agent, settings) for sample in group for agent in sample.agent_rewards}
    return [
        [own[call.agent][index] if call.agent in own else shared[index] for call in sample.calls]
        for index, sample in enumerate(group)
    ]


def has_signal(rewards: Sequence[float | None]) -> bool:
    """Whether two valid rewards differ; a constant group has a zero gradient."""
    valid = [reward for reward in rewards if is_valid(reward)]
    return len(valid) >= 2 and min(valid) < max(valid)


def group_has_signal(group: Sequence[Sample]) -> bool:
    """Whether any baseline of the group, its agents' own ones included, tells its episodes apart."""
    agents = {agent for sample in group for agent in sample.agent_rewards}
    return has_signal([sample.reward for sample in group]) or any(
        has_signal(_agent_rewards(group, agent)) for agent in agents
    )


def is_valid(reward: float | None) -> TypeIs[float]:
    """Whether a reward may be learnt from."""
    return reward is not None and math.isfinite(reward)


def _agent_rewards(group: Sequence[Sample], agent: str) -> list[float | None]:
    return [
        sample.agent_rewards.get(agent, sample.reward) if any(call.agent == agent for call in sample.calls) else None
        for sample in group
    ]


def _agent_advantages(group: Sequence[Sample], agent: str, settings: AlgorithmSettings) -> list[float]:
    return _finite(group_advantages(_agent_rewards(group, agent), settings))


def _finite(advantages: Sequence[float | None]) -> list[float]:
    return [advantage or 0.0 for advantage in advantages]

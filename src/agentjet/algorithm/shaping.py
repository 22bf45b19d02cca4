"""What is taken from rewards before advantages are made of them: divergence and excess length.

Invariants: a reward pays for those calls only whose terms carry its advantage; what a client reported stays as it was,
in metrics and where constant groups are told.

It does not know tensors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentjet.config import AlgorithmSettings
from agentjet.schemas.sample import Sample


@dataclass(frozen=True, slots=True)
class Shaped:
    """The rewards of a sample that advantages are made of."""

    episode: float
    agents: dict[str, float]
    """Of agents of their own."""
    calls: tuple[float | None, ...]
    """[calls] of single calls; None for those without."""


def shaped_rewards(
    group: Sequence[Sample], divergence: Sequence[Sequence[float]] | None, settings: AlgorithmSettings
) -> list[Shaped]:
    """The shaped rewards of each sample of a group.

    - `kl = "k1"`: less coefficient x the sum over terms of log sampler - log reference (Ouyang et al.,
      arXiv:2203.02155, equation 2): an unbiased estimate of KL(sampler || reference) of the whole sequence.
    - `overlong = "penalty"`: less the penalty of the longest sequence (`length_penalty`).

    A single call's reward pays for its own divergence and length, the last call's for the episode's length where that
    is the sequence.

    Args:
        group: As it was sampled, nothing cut.
        divergence: [samples][calls] sum over the call's terms of log sampler - log reference; None: 0.
        settings: `kl_coefficient`, `overlong_...` and `sequence`.
    """
    own = {agent for sample in group for agent in sample.agent_rewards}
    rows = divergence or [[0.0] * len(sample.calls) for sample in group]
    return [_shaped(sample, row, own, settings) for sample, row in zip(group, rows, strict=True)]


def _shaped(sample: Sample, divergence: Sequence[float], own: set[str], settings: AlgorithmSettings) -> Shaped:
    everything = range(len(sample.calls))
    places = {agent: [i for i in everything if sample.calls[i].agent == agent] for agent in own}
    shared = [i for i in everything if sample.calls[i].agent not in own]

    def cost(chosen: Sequence[int], measured: Sequence[int]) -> float:
        """Of the divergence of some calls and the length of some."""
        kl = settings.kl_coefficient * math.fsum(divergence[place] for place in chosen) if settings.kl == "k1" else 0.0
        return kl + length_penalty([sample.calls[place].num_terms for place in measured], settings)

    def of_call(place: int) -> float | None:
        reward = sample.calls[place].reward
        whole = everything if place == everything[-1] else ()
        return None if reward is None else reward - cost([place], [place] if settings.sequence == "call" else whole)

    agents = {
        agent: sample.agent_rewards.get(agent, sample.reward) - cost(chosen, chosen)
        for agent, chosen in places.items()
        if chosen
    }
    return Shaped(
        episode=sample.reward - cost(shared, shared),
        agents={**sample.agent_rewards, **agents},
        calls=tuple(map(of_call, everything)),
    )


def length_penalty(lengths: Sequence[int], settings: AlgorithmSettings) -> float:
    """What the longest sequence of some calls costs (DAPO's soft over-long punishment, arXiv:2503.14476, equation 13).

    0 up to `overlong_tokens - overlong_buffer_tokens`, then growing linearly, and `overlong_penalty` from
    `overlong_tokens` on.

    Args:
        lengths: Sampled tokens of each call.
        settings: As above, and what a `sequence` is.
    """
    if settings.overlong != "penalty":
        return 0.0
    longest = max(lengths, default=0) if settings.sequence == "call" else sum(lengths)
    excess = longest - (settings.overlong_tokens - settings.overlong_buffer_tokens)
    if excess <= 0:
        return 0.0
    return settings.overlong_penalty * min(1.0, excess / max(settings.overlong_buffer_tokens, 1))

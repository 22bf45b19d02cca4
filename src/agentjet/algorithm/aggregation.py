"""The weight of every term's loss, so that a batch's loss is one plain sum.

Invariant: every denominator belongs to the whole optimizer step. Micro-batches and ranks therefore only add up, and no
split changes the result.

It does not know rewards or tensors.
"""

from collections.abc import Sequence

from agentjet.config import AlgorithmSettings


def term_weights(episodes: Sequence[Sequence[int]], settings: AlgorithmSettings) -> list[list[float]]:
    """[episodes][calls] the weight of each of a call's terms.

    Args:
        episodes: Number of trained terms of each call of each episode in the optimizer step. Terms that were cut away
            and groups that were dropped are not in it, so they count in no denominator.
        settings: `aggregation`, with `sequence` and `constant_divisor`.

    - `episode`: each episode's terms sum to 1 / episodes.
    - `token_mean`: 1 / terms (DAPO, arXiv:2503.14476, equation 8).
    - `sequence_mean`: 1 / (sequences x length) (GRPO, arXiv:2402.03300, equation 3).
    - `sequence_sum`: 1 / sequences.
    - `constant`: 1 / (sequences x divisor) (Dr. GRPO, arXiv:2503.20783).
    """
    num_terms = sum(map(sum, episodes))
    num_episodes = sum(any(calls) for calls in episodes)
    num_calls = sum(length > 0 for calls in episodes for length in calls)
    num_sequences = num_calls if settings.sequence == "call" else num_episodes

    def weight(length: int, calls: Sequence[int]) -> float:
        if length == 0:
            return 0.0
        match settings.aggregation:
            case "episode":
                return 1 / (num_episodes * sum(calls))
            case "token_mean":
                return 1 / num_terms
            case "sequence_mean":
                return 1 / (num_sequences * (length if settings.sequence == "call" else sum(calls)))
            case "sequence_sum":
                return 1 / num_sequences
            case "constant":
                return 1 / (num_sequences * settings.constant_divisor)

    return [[weight(length, calls) for length in calls] for calls in episodes]

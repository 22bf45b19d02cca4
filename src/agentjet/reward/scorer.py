"""From an ended episode to its score: pure decisions.

An outcome is *scored* only with a finite reward. Whatever failed on the way, agent, tool, judge or function, makes the
episode *invalid* and is never a reward of 0; a wrong answer is the agent's own and is a score.
"""

import math
from typing import Any

from agentjet.schemas.episode import PROMPT_TOO_LONG, EndStatus, Episode, Fault
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.task import EpisodeKind

CLIENT = "client"
"""`pool.reward` that leaves the score to the agent's own return; also `Score.judged_by` of such a score."""

_MAX_MESSAGE = 2_000

NO_REWARD = Fault(
    kind="no_reward",
    message="the agent returned no reward and its pool has no reward function; return one or set pools.NAME.reward",
)


def unscored(episode: Episode) -> Score | None:
    """The score of an episode that was not completed, or None of one that was: somebody has to give it a reward."""
    if episode.status is EndStatus.DEAD:
        return _unscored(episode, Outcome.DEAD, episode.fault)
    if episode.status is EndStatus.ABORTED:
        return _unscored(episode, Outcome.ABORTED, episode.fault)
    if episode.status is EndStatus.FAILED:
        if episode.fault is not None and episode.fault.kind == PROMPT_TOO_LONG:
            # Each further offer would meet the same prompt.
            return _unscored(episode, Outcome.DEAD, episode.fault)
        return _unscored(episode, Outcome.INVALID, episode.fault)
    return None


def decide(episode: Episode, reward: str) -> Score | None:
    """The score that needs no function, or None when the pool's function `reward` has to be asked."""
    score = unscored(episode)
    if score is not None:
        return score
    if episode.reward is not None:
        if not math.isfinite(episode.reward):
            message = f"the agent returned the reward {episode.reward}, which is no finite number"
            return invalid(episode, "no_reward", message, judged_by=CLIENT)
        return scored(episode, {"reward": episode.reward}, judged_by=CLIENT)
    if reward == CLIENT:
        return _unscored(episode, Outcome.INVALID, NO_REWARD, judged_by=CLIENT)
    return None


def scored(episode: Episode, verdict: dict[str, Any], *, judged_by: str) -> Score:
    """A score with a reward; `verdict` as `agentjet.reward.function.verdict` gives it."""
    return Score(
        run=episode.run,
        ticket=episode.ticket.without_task(),
        attempt=episode.attempt,
        outcome=Outcome.SCORED,
        reward=float(verdict["reward"]),
        components=verdict.get("components", {}),
        agent_rewards=verdict.get("agent_rewards", {}),
        call_rewards=verdict.get("call_rewards") or episode.call_rewards,
        metrics=_finite(episode.metrics) | verdict.get("metrics", {}),
        calls=episode.calls,
        judged_by=judged_by,
    )


def invalid(episode: Episode, kind: str, message: str, *, judged_by: str) -> Score:
    """A score without a reward, because the judging failed."""
    fault = Fault(kind=kind, message=message[:_MAX_MESSAGE])
    return _unscored(episode, Outcome.INVALID, fault, judged_by=judged_by)


def dead(episode: Episode, kind: str, message: str, *, judged_by: str) -> Score:
    """A score without a reward that closes the slot: a further offer would be in vain."""
    return _unscored(episode, Outcome.DEAD, Fault(kind=kind, message=message[:_MAX_MESSAGE]), judged_by=judged_by)


def question(episode: Episode) -> dict[str, Any]:
    """What a reward function is told of an episode."""
    return {
        "task": episode.ticket.task,
        "episode": {
            "result": episode.result,
            "metrics": episode.metrics,
            "transcript": list(episode.transcript),
            "stop_reason": episode.stop_reason,
            "models": list(episode.ticket.models),
            "num_calls": sum(len(calls) for calls in episode.calls.values()),
            "calls": {model: list(calls) for model, calls in episode.calls.items()},
            "call_rewards": episode.call_rewards,
            "seed": episode.ticket.seed,
            "is_eval": episode.ticket.kind is EpisodeKind.EVAL,
        },
    }


def _unscored(episode: Episode, outcome: Outcome, fault: Fault | None, *, judged_by: str = "") -> Score:
    return Score(
        run=episode.run,
        ticket=episode.ticket.without_task(),
        attempt=episode.attempt,
        outcome=outcome,
        calls=episode.calls,
        fault=fault,
        judged_by=judged_by,
    )


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    """A client's number that is none would spoil the run's means."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}

"""Streaks: episodes of a pool that failed one after the other, and when nothing more is issued over them. Pure.

Invariants:

- One scored episode ends its pool's streak, whatever its reward: a wrong answer is no failure.
- A streak as long as three batches of training episodes stops admission. It never stops it for good: a group is let
  through every `PROBE_SECONDS`, and one at once when the pool's code has changed, to see whether the fault is gone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from agentjet.config.settings import SwarmSettings
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.task import EpisodeKind

MIN_PROBLEM = 8
"""Failures in a row from which on a person is told."""
MIN_STOP = 32
"""Training failures in a row below which admission goes on, however small the batches are."""
STOP_BATCHES = 3
PROBE_SECONDS = 30.0
_MAX_MESSAGE = 200
_CLIENT = "client"
"""`judged_by` of a score that the agent gave itself."""


@dataclass(slots=True)
class Streak:
    """Failures of a pool since its last scored episode."""

    num_failed: int = 0
    """Training and evaluation."""
    num_training: int = 0
    fault: str = "no reason given"
    """Of the newest: kind and message."""
    is_judges: bool = False
    """The newest fault is the reward function's."""

    def take(self, score: Score) -> None:
        """One more failure."""
        self.num_failed += 1
        self.num_training += score.ticket.kind is EpisodeKind.TRAIN
        if score.fault is not None:
            words = " ".join(score.fault.message.split())
            self.fault = f"{score.fault.kind}: {words if len(words) <= _MAX_MESSAGE else words[:_MAX_MESSAGE] + '...'}"
        self.is_judges = score.judged_by not in ("", _CLIENT)


@dataclass(slots=True)
class Streaks:
    """The streak of every pool.

    Args:
        limits: Training failures in a row at which a pool's admission stops.
        played: Pools whose agents rollouts play; those of others belong to clients.
    """

    limits: Mapping[str, int]
    played: frozenset[str] = frozenset()
    _streaks: dict[str, Streak] = field(default_factory=dict[str, Streak])
    _issued: dict[str, float] = field(default_factory=dict[str, float])
    _changed: set[str] = field(default_factory=set[str])

    def score(self, score: Score) -> None:
        """An episode was scored or failed."""
        pool = score.ticket.pool
        if score.outcome is Outcome.SCORED:
            self._streaks.pop(pool, None)
            self._changed.discard(pool)
        else:
            self._streaks.setdefault(pool, Streak()).take(score)

    def issued(self, pool: str, time: float) -> None:
        """A training group of the pool was issued at a JetStream time."""
        self._issued[pool] = time
        self._changed.discard(pool)

    def changed(self, pool: str) -> None:
        """The pool's code is another one now."""
        if self.is_stopping(pool):
            self._changed.add(pool)

    def is_stopping(self, pool: str) -> bool:
        """Whether the pool's admission stands still, but for probes."""
        streak = self._streaks.get(pool)
        return streak is not None and streak.num_training >= self.limits.get(pool, MIN_STOP)

    def is_probe_due(self, pool: str, now: float) -> bool:
        """Whether a group may be issued all the same."""
        return pool in self._changed or now - self._issued.get(pool, 0.0) >= PROBE_SECONDS

    def problems(self) -> list[str]:
        """One sentence for each pool with a long streak."""
        return [
            f"the last {streak.num_failed} episodes of pool {pool} failed: {streak.fault}; see {self._log(pool)}"
            + ("; admission has stopped" if self.is_stopping(pool) else "")
            for pool, streak in self._streaks.items()
            if streak.num_failed >= MIN_PROBLEM
        ]

    def stops(self) -> Iterator[tuple[str, str, str]]:
        """Pool, sentence, and who can help, for each pool whose admission stands still."""
        for pool, streak in self._streaks.items():
            if self.is_stopping(pool):
                of = f" of pool {pool}" if len(self.limits) > 1 else ""
                culprit = self._culprit(pool)
                hint = "a changed file is picked up" if pool in self.played else "it is tried again now and then"
                yield (
                    pool,
                    f"admission{of} stopped: {streak.num_failed} episodes in a row failed with {streak.fault}; "
                    f"fix {culprit}: {hint}",
                    f"the author of {culprit}",
                )

    def _culprit(self, pool: str) -> str:
        if self._streaks[pool].is_judges:
            return "the reward function"
        return "the agent" if pool in self.played else "the client"

    def _log(self, pool: str) -> str:
        if self._streaks[pool].is_judges:
            return "logs/reward.log"
        return "logs/rollout.log" if pool in self.played else "the output of its clients"


def streaks_of(settings: SwarmSettings) -> Streaks:
    """No streak yet; the limits are those of the pools that train."""
    limits: dict[str, int] = {}
    for pool, one in settings.pools.items():
        batches = [settings.models[model].learner.batch_groups for model in settings.trained_models(pool)]
        if one.weight > 0 and batches:
            limits[pool] = max(MIN_STOP, STOP_BATCHES * max(batches) * one.group_size)
    return Streaks(limits, frozenset(pool for pool, one in settings.pools.items() if one.workflow))

"""Streaks: episodes of a pool that failed one after the other, and when nothing more is issued over them. Pure.

Invariants:

- One scored episode ends its pool's streak, whatever its reward: a wrong answer is no failure.
- A streak as long as three batches of training episodes stops admission. It never stops it for good: a group is let
  through every `PROBE_SECONDS`, and one at once when the pool's code has changed, to see whether the fault is gone.
- Well before that, when the first offers of half a batch of groups have failed, the pool is down: a tool server is
  away, say, and playing failed slots again would only use up their offers. Groups are counted by their first offers,
  so that a few broken tasks, which fail while others succeed and then again while nobody else plays, are not taken
  for an outage. A judged pool is never down: those of its episodes that went well have no score yet.
- What of a pool is let through while it is down, a paused slot or a new group, goes one at a time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from agentjet.config.settings import SwarmSettings
from agentjet.curriculum.code import is_file
from agentjet.schemas.ids import GroupId
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.task import EpisodeKind

MIN_PROBLEM = 8
"""Failures in a row from which on a person is told."""
MIN_STOP = 32
"""Training failures in a row below which admission goes on, however small the batches are."""
STOP_BATCHES = 3
MIN_DOWN = 2
"""Groups whose first offers failed in a row, below which no pool is down."""
PROBE_SECONDS = 30.0
"""Longest time between two probes."""
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
    judge: str = ""
    """Whose the newest fault is, where it is not the agent's: the reward function or the group judge."""
    groups: set[GroupId] = field(default_factory=set[GroupId])
    """Groups of which a first offer failed and could have gone well."""
    num_probes: int = 0
    """Further offers that failed while the pool was down."""
    time: float = 0.0
    """Of the newest failure, JetStream time."""

    def take(self, score: Score, time: float) -> None:
        """One more failure, stored at a JetStream time."""
        self.num_failed += 1
        self.time = time
        ticket = score.ticket
        if ticket.offer == 0 and score.outcome is not Outcome.DEAD and not ticket.is_judged:
            self.groups.add(ticket.group)
        self.num_training += ticket.kind is EpisodeKind.TRAIN
        if score.fault is not None:
            words = " ".join(score.fault.message.split())
            self.fault = f"{score.fault.kind}: {words if len(words) <= _MAX_MESSAGE else words[:_MAX_MESSAGE] + '...'}"
        is_judges = score.judged_by not in ("", _CLIENT)
        self.judge = ("the group judge" if ticket.is_judged else "the reward function") if is_judges else ""


@dataclass(slots=True)
class Streaks:
    """The streak of every pool.

    Args:
        limits: Training failures in a row at which a pool's admission stops.
        played: Pools whose agents rollouts play; those of others belong to clients.
        down: Groups whose first offers failed in a row at which a pool is down.
        watched: Pools whose agent, reward function or group judge is a file, which is looked at for changes; a module
            is not.
    """

    limits: Mapping[str, int]
    played: frozenset[str] = frozenset()
    down: Mapping[str, int] = field(default_factory=dict[str, int])
    watched: frozenset[str] = frozenset()
    _streaks: dict[str, Streak] = field(default_factory=dict[str, Streak])
    _issued: dict[str, float] = field(default_factory=dict[str, float])
    _changed: set[str] = field(default_factory=set[str])

    def score(self, score: Score, time: float) -> None:
        """An episode was scored or failed, by a score stored at a JetStream time."""
        pool = score.ticket.pool
        if score.outcome is Outcome.SCORED:
            self._streaks.pop(pool, None)
            self._changed.discard(pool)
        else:
            streak = self._streaks.setdefault(pool, Streak())
            streak.num_probes += score.ticket.offer > 0 and self.is_down(pool)
            streak.take(score, time)

    def issued(self, pool: str, time: float) -> None:
        """A training group of the pool was issued at a JetStream time."""
        self._issued[pool] = time
        self._changed.discard(pool)

    def changed(self, pool: str) -> None:
        """The pool's code is another one now."""
        if self.is_stopping(pool) or self.is_down(pool):
            self._changed.add(pool)

    def probed(self, pool: str) -> None:
        """A slot of the pool was offered again."""
        self._changed.discard(pool)

    def has_changed(self, pool: str) -> bool:
        """Whether the pool's code is another one, which nobody has played yet."""
        return pool in self._changed

    def is_down(self, pool: str) -> bool:
        """Whether whatever is played of the pool fails."""
        streak = self._streaks.get(pool)
        return streak is not None and len(streak.groups) >= self.down.get(pool, MIN_DOWN)

    def next_probe(self, pool: str) -> float:
        """When a slot of a pool that is down may be offered again, JetStream time: after 1, 2, 4 ... seconds."""
        streak = self._streaks[pool]
        return streak.time + min(2.0 ** min(streak.num_probes, 10), PROBE_SECONDS)

    def fault(self, pool: str) -> str:
        """The newest fault of a pool with a streak."""
        return self._streaks[pool].fault

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
                hint = "a changed file is picked up" if pool in self.watched else "it is tried again now and then"
                yield (
                    pool,
                    f"admission{of} stopped: {streak.num_failed} episodes in a row failed with {streak.fault}; "
                    f"fix {culprit}: {hint}",
                    self.helper(pool),
                )

    def helper(self, pool: str) -> str:
        """Who can help a pool with a streak."""
        return f"the author of {self._culprit(pool)}"

    def _culprit(self, pool: str) -> str:
        return self._streaks[pool].judge or ("the agent" if pool in self.played else "the client")

    def _log(self, pool: str) -> str:
        if self._streaks[pool].judge:
            return "logs/reward.log"
        return "logs/rollout.log" if pool in self.played else "the output of its clients"


def streaks_of(settings: SwarmSettings) -> Streaks:
    """No streak yet; the limits are those of the pools that train."""
    limits, down = dict[str, int](), dict[str, int]()
    for pool, one in settings.pools.items():
        batches = [settings.models[model].learner.batch_groups for model in settings.trained_models(pool)]
        if one.weight > 0 and batches:
            limits[pool] = max(MIN_STOP, STOP_BATCHES * max(batches) * one.group_size)
            down[pool] = max(MIN_DOWN, max(batches) // 2)
    pools = settings.pools.items()
    return Streaks(
        limits,
        played=frozenset(pool for pool, one in pools if one.workflow),
        down=down,
        watched=frozenset(
            pool for pool, one in pools if any(map(is_file, (one.workflow, one.reward, one.group_judge)))
        ),
    )

"""How many groups may be out: the bound on staleness, kept by admission and never by discarding.

Per model, in groups: a group is issued only while `issued - dropped < trained + (a + 1) x batch`, where `trained`
counts the groups of the steps that count (with a constant batch size this is (a + steps + 1) x batch). It also needs
room below the next evaluation (no learner can pass step v before the evaluation at v has settled) and below the run's
last step. A ticket needs room in every model that it trains.

Why staleness is at most a + w (`max_staleness`). Let batch = b and call e the effective rank of a group: the
undropped groups issued before it.

1. A group issued while s steps count has e < (s + a + 1) b. Later drops only lower e.
2. The group trains at step floor(e / b) + 1 + w at the latest. Suppose step k = floor(e / b) + 1 + w is formed without
   it. It is complete then, as e < (k - w) b (the rule of `agentjet.accounting.fold`), so step k took b lower ranks.
   Let j < k be the last step that took a rank above e (0 for none): steps j + 1 ... k took (k - j) b ranks below e.
   Step j took all complete lower ranks first, so those ranks were incomplete at j, hence at or above (j - w) b. With
   e itself: (k - j) b + 1 <= e + 1 - max(0, (j - w) b), so (k - w) b <= e: a contradiction.
3. By 1 and 2 it trains at step s + a + 1 + w at the latest, on weights of s + a + w steps, while its tokens were drawn
   after s steps: a + w steps apart. Engines that have not loaded step s yet add the steps that they lag behind.

Which pool comes next (`PoolMix`) is start-time fair queueing over the offered groups: a pure function of the issues in
the ledger, so a restarted curriculum goes on with the same mix.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """The state of one model's admission, in groups unless named otherwise."""

    batch_groups: int
    admission_bound: int
    """a."""
    num_steps: int
    """Steps that count."""
    num_trained: int
    """Groups of those steps."""
    num_issued: int
    num_dropped: int
    last_step: int | None = None
    """Step that ends the run; None goes on."""
    barrier_step: int | None = None
    """Step of the next evaluation that has not settled; None when there is none."""

    @property
    def num_out(self) -> int:
        """Groups issued that are neither trained nor dropped."""
        return self.num_issued - self.num_dropped - self.num_trained

    @property
    def room(self) -> int:
        """Groups that may be issued now; 0 when none."""
        limits = [self.admission_bound + 1]
        limits += [step - self.num_steps for step in (self.last_step, self.barrier_step) if step is not None]
        return max(0, min(limits) * self.batch_groups - self.num_out)

    @property
    def is_final(self) -> bool:
        """Whether all groups of the run are out: only a drop or a voided step makes room again."""
        if self.last_step is None:
            return False
        return self.num_out >= (self.last_step - self.num_steps) * self.batch_groups

    @property
    def is_done(self) -> bool:
        """Whether the learner has taken the run's last step."""
        return self.last_step is not None and self.num_steps >= self.last_step

    @property
    def is_idle(self) -> bool:
        """Whether the learner can take no whole batch of what is out."""
        return self.is_done or self.num_out < self.batch_groups


def max_staleness(admission_bound: int, straggler_bound: int) -> int:
    """Most steps between the weights that drew a token and those that it trains (derivation above): a + w."""
    return admission_bound + straggler_bound


class PoolMix:
    """Whose turn it is among the pools, by weight over offered groups.

    A pool that sat out keeps at most one turn of credit, so it does not take over when it comes back.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._now = 0.0
        self._finish = dict.fromkeys(weights, 0.0)

    def _start(self, pool: str) -> float:
        return max(self._finish[pool], self._now - 1 / self._weights[pool])

    def pick(self, eligible: Iterable[str]) -> str | None:
        """The pool whose turn it is among the eligible ones, or None; ties go by the order of the settings."""
        wanted = set(eligible)
        candidates = [pool for pool in self._weights if pool in wanted]
        return min(candidates, key=lambda pool: self._start(pool) + 1 / self._weights[pool], default=None)

    def record(self, pool: str) -> None:
        """A group of the pool was issued (groups of pools no longer configured do not count)."""
        if pool in self._weights:
            self._now = start = self._start(pool)
            self._finish[pool] = start + 1 / self._weights[pool]

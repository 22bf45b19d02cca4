"""When evaluations are due: before the first step, every N steps and after the last.

An evaluation at step v is a barrier: no group is issued that could carry a learner past v until it has settled.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The schedule.

    Args:
        every_steps: N; 0 leaves only the first and the last.
        last_step: The run's last step; None while it has none.
    """

    every_steps: int
    last_step: int | None

    def next_step(self, num_steps: int, is_done: Callable[[int], bool]) -> int | None:
        """The first step on the schedule, from `num_steps` on, whose evaluation has not settled; None for none."""
        step: int | None = self._at_or_after(num_steps)
        while step is not None and is_done(step):
            step = self._at_or_after(step + 1)
        return step

    def _at_or_after(self, step: int) -> int | None:
        ends = [0] if self.last_step is None else [0, self.last_step]
        if self.every_steps:
            ends.append(-(-step // self.every_steps) * self.every_steps)
        return min((end for end in ends if end >= step and end <= (self.last_step or end)), default=None)

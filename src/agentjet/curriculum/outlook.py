"""What a run waits for, in words: for what, since when, and who could unblock it."""

from collections import Counter
from collections.abc import Iterator, Mapping

from agentjet.bus.clock import BusClock
from agentjet.curriculum.course import Course
from agentjet.schemas.ids import GroupId
from agentjet.schemas.presence import Waiting

MAX_JUDGES = 5
"""Groups waiting for their judges that are named one by one."""


class Outlook:
    """The curriculum's view on who holds up what.

    Args:
        course: The state of the run.
        clock: The bus's time.
        stop_ratio: Fill of a stream at which no new group is issued.
    """

    def __init__(self, course: Course, clock: BusClock, stop_ratio: float) -> None:
        self._course, self._clock, self._stop_ratio = course, clock, stop_ratio
        self._since: dict[str, float] = {}
        self.fills: Mapping[str, float] = {}
        """Fill of each stream, 0 to 1, as last seen."""

    @property
    def full_streams(self) -> list[str]:
        """Streams whose fill stops admission, the fullest first."""
        full = [name for name, fill in self.fills.items() if fill >= self._stop_ratio]
        return sorted(full, key=lambda name: -self.fills[name])

    def waiting(self) -> list[Waiting]:
        """Everything that the run waits for now."""
        found = list(self._find())
        now = self._clock.now()
        self._since = {key: self._since.get(key, now) for key, _, _ in found}
        return [Waiting(what=what, since=self._since[key], unblocked_by=by) for key, what, by in found]

    def _find(self) -> Iterator[tuple[str, str, str]]:
        for name in self.full_streams:
            yield f"stream {name}", f"stream {name} is {self.fills[name]:.0%} full: nothing is issued", "free space"
        for pool, what, by in self._course.streaks.stops():
            yield f"stop {pool}", what, by
        yield from self._paused()
        unclaimed, playing = self._tickets()
        for pool, count in unclaimed.items():
            yield f"claim {pool}", f"no rollout has claimed {count} tickets of pool {pool}", "a rollout or client"
        for pool, count in playing.items():
            yield f"end {pool}", f"{count} episodes of pool {pool} are played or being scored", "rollout, reward"
        yield from self._judges()
        yield from self._evaluation()
        yield from self._learners()

    def _tickets(self) -> tuple[Counter[str], Counter[str]]:
        board = self._course.board
        unclaimed, playing = Counter[str](), Counter[str]()
        for out, _, ticket in board.open_slots():
            if ticket in board.paused:
                continue
            is_claimed = ticket in board.claims or ticket in board.ended
            (playing if is_claimed else unclaimed)[out.issue.pool] += 1
        return unclaimed, playing

    def _paused(self) -> Iterator[tuple[str, str, str]]:
        now, streaks = self._clock.now(), self._course.streaks
        for one in self._course.reoffers.waiting():
            what = f"{one.num_slots} slots of pool {one.pool} wait to be offered again"
            by = "the pause after a failure"
            if streaks.is_down(one.pool):
                what += f", one at a time, as all that was played failed with {streaks.fault(one.pool)}"
                by = streaks.helper(one.pool)
            next_in = "after the one that is played" if one.due is None else f"in {max(0.0, one.due - now):.0f} s"
            yield f"again {one.pool}", f"{what}; next {next_in}", by

    def _judges(self) -> Iterator[tuple[str, str, str]]:
        """Judged groups of which some members have ended and others have not, the oldest first."""
        waits: list[tuple[GroupId, int]] = []
        for out in self._course.board.groups.values():
            if out.issue.is_judged:
                ended = [self._course.board.has_ended(out, member) for member in out.open_members]
                if any(ended) and not all(ended):
                    waits.append((out.group, ended.count(False)))
        for group, count in waits[:MAX_JUDGES]:
            what = f"judge of group {group} waits for {count} member{'s' * (count != 1)} to end"
            yield f"judge {group}", what, "who plays them, or their deadline"
        if len(waits) > MAX_JUDGES:
            num_more = len(waits) - MAX_JUDGES
            what = f"judges of {num_more} more group{'s' * (num_more != 1)} wait for members to end"
            yield "judges", what, "who plays them, or their deadline"

    def _evaluation(self) -> Iterator[tuple[str, str, str]]:
        step = self._course.evaluation_due()
        if step is not None:
            num_open, size = self._course.evaluation.open_episodes(step)
            what = f"evaluation at step {step}: {num_open} of {size} episodes open"
            yield f"evaluation {step}", what if size else f"evaluation at step {step} is due", "rollout, reward"

    def _learners(self) -> Iterator[tuple[str, str, str]]:
        for model in self._course.trained_models:
            learner, load = self._course.learners[model], self._course.load(model)
            if learner.head is None:
                yield f"learner {model}", f"model {model}: no learner has started", f"the learner of {model}"
            elif self._course.board.num_waiting(model) >= load.batch_groups:
                step = learner.num_steps + 1
                what = f"model {model}: waiting for step {step} of its learner"
                yield f"step {model} {step}", what, f"the learner of {model}, merger"

    def metrics(self) -> dict[str, float]:
        """Figures of the moment."""
        unclaimed, playing = self._tickets()
        figures = {
            "tickets_unclaimed": float(unclaimed.total()),
            "tickets_playing": float(playing.total()),
            "tickets_paused": float(len(self._course.board.paused)),
            "groups_out": float(len(self._course.board.groups)),
            "stream_fill_max_ratio": max(self.fills.values(), default=0.0),
        }
        for model in self._course.trained_models:
            load = self._course.load(model)
            figures[f"groups_issued/{model}"] = float(load.num_issued)
            figures[f"groups_dropped/{model}"] = float(load.num_dropped)
            figures[f"steps/{model}"] = float(load.num_steps)
        return figures

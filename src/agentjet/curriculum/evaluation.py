"""The evaluations of a run: which is due, what of it is out, and whether it has settled. Pure; fed from the streams.

An evaluation at step v is issued when its models have reached v and no learner can take another whole batch; then the
heads of their ledgers are the versions that have to answer. It counts as done while those versions stay valid.
"""

from collections.abc import Iterator, Mapping

from agentjet.accounting.ledger import LedgerView
from agentjet.config.settings import SwarmSettings
from agentjet.curriculum.board import Board
from agentjet.curriculum.plan import EvalPlan
from agentjet.schemas.ids import Version
from agentjet.schemas.ledger import GroupIssue


class Evaluation:
    """What `eval` of the settings asks for, and how far it is.

    Args:
        settings: The whole configuration.
        board: Knows which evaluation groups are out.
        learners: The chain of each model.
        num_tasks: Groups of one evaluation; 0 when its pool has no tasks.
    """

    def __init__(
        self, settings: SwarmSettings, board: Board, learners: Mapping[str, LedgerView], num_tasks: int
    ) -> None:
        self._board, self._learners = board, learners
        self.pool = settings.eval.pool
        """Empty when nothing is evaluated."""
        self.models = settings.trained_models(self.pool) if self.pool else ()
        """Trained models that the evaluation plays."""
        self.num_tasks = num_tasks
        self._plan = EvalPlan(settings.eval.every_steps, settings.run.num_steps or None) if self.pool else None

    @property
    def _num_steps(self) -> int:
        return max((self._learners[model].num_steps for model in self.models), default=0)

    @property
    def next_step(self) -> int | None:
        """Step of the next evaluation that has not settled; None when there is none."""
        return None if self._plan is None else self._plan.next_step(self._num_steps, self._is_done)

    @property
    def reached_step(self) -> int | None:
        """Step of the next evaluation, if the models have reached it."""
        step = self.next_step
        return step if step is not None and self._num_steps >= step else None

    @property
    def closing_step(self) -> int | None:
        """Where the models stand, if that has not been evaluated: what is owed once training is over."""
        return None if self._plan is None or self._is_done(self._num_steps) else self._num_steps

    def _is_done(self, step: int) -> bool:
        found = {issue.position: is_closed for issue, is_closed in self._valid(step)}
        return len(found) >= self.num_tasks and all(found.values())

    def _valid(self, step: int) -> Iterator[tuple[GroupIssue, bool]]:
        """Groups of an evaluation whose versions still count, and whether each has settled."""
        for issue, out in self._board.evaluations.get(step, ()):
            if not self.is_void(issue):
                yield issue, not out.open_members

    def is_void(self, issue: GroupIssue) -> bool:
        """Whether a version that has to answer is gone, with the steps that a learner lost."""
        pins = ((model, pin) for model, pin in issue.pins.items() if model in self._learners)
        return not all(self._learners[model].is_valid(Version.parse(pin)) for model, pin in pins)

    def pins(self, step: int) -> Mapping[str, str] | None:
        """The versions that have to answer an evaluation; None while a model has no learner.

        Those that its first group was issued with, whatever a learner that starts again calls the same weights.
        """
        for issue, _ in self._valid(step):
            return issue.pins
        heads = {model: self._learners[model].head for model in self.models}
        return None if None in heads.values() else {model: str(head) for model, head in heads.items()}

    def next_place(self, step: int) -> int | None:
        """The next task of an evaluation that has not been issued; None when all are out."""
        issued = {issue.position for issue, _ in self._valid(step)}
        return next((place for place in range(self.num_tasks) if place not in issued), None)

    def open_episodes(self, step: int) -> tuple[int, int]:
        """How many of an evaluation's episodes are open, and how many it has."""
        outs = [out for _, out in self._board.evaluations.get(step, ())]
        return sum(len(out.open_members) for out in outs), sum(out.issue.size for out in outs)

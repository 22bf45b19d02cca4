"""What comes next in a run, decided from its ledger and scores alone.

Pure: the same records in the same order lead to the same decisions, so a restarted curriculum goes on where the ledger
ends. The rules are those of `agentjet.accounting.admission` (room, mix) and `agentjet.curriculum.plan` (evaluations).

An evaluation at step v is issued when its models have reached v and no learner can take another whole batch; then the
heads of their ledgers are the versions that have to answer. It counts as done while those versions stay valid.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agentjet.accounting.admission import ModelLoad, PoolMix
from agentjet.accounting.ledger import CurriculumView, LedgerView
from agentjet.config.settings import PoolSettings, SwarmSettings
from agentjet.curriculum.board import Board
from agentjet.curriculum.dataset import TaskOrder, task_seed
from agentjet.curriculum.plan import EvalPlan
from agentjet.curriculum.streak import streaks_of
from agentjet.errors import ConfigError, FencedError
from agentjet.schemas.claim import OfferRequest
from agentjet.schemas.ids import GroupId, RunId, Version, group_id
from agentjet.schemas.ledger import CurriculumStart, GroupDrop, GroupIssue, LearnerStart, LearnerStep
from agentjet.schemas.record import Record
from agentjet.schemas.subject import CURRICULUM
from agentjet.schemas.task import EpisodeKind

OFFER_MEMORY_SECONDS = 10.0
"""How long room is kept for a client whose offer was refused for want of room."""


class Course:
    """The state of a run as its curriculum sees it.

    Args:
        run: The run.
        settings: The whole configuration.
        orders: Data set of each pool that has one.
    """

    def __init__(self, run: RunId, settings: SwarmSettings, orders: Mapping[str, TaskOrder]) -> None:
        self.run, self.settings, self.orders = run, settings, orders
        self.ledger = CurriculumView()
        self.learners: dict[str, LedgerView] = {model: LedgerView() for model in self.trained_models}
        self.board = Board(run, self.task_of)
        self.streaks = streaks_of(settings)
        self.incarnation = 0
        self._mix = PoolMix({pool: one.weight for pool, one in settings.pools.items() if self._is_trained(pool)})
        self._positions: dict[str, int] = {}
        self._client_groups: dict[tuple[str, str], int] = {}
        self._wanted: dict[str, float] = {}
        self._retries: dict[str, GroupId] = {}
        self._owed: dict[str, GroupIssue] = {}
        self._last_sequences: dict[str, int] = {}
        last_step = settings.run.num_steps or None
        self._plan = EvalPlan(settings.eval.every_steps, last_step) if settings.eval.pool else None

    @property
    def trained_models(self) -> tuple[str, ...]:
        """Models with learners, in the order of the file."""
        return tuple(name for name, one in self.settings.models.items() if one.is_trained)

    def _is_trained(self, pool: str) -> bool:
        return self.settings.pools[pool].weight > 0 and bool(self.settings.trained_models(pool))

    @property
    def training_pools(self) -> tuple[str, ...]:
        """Pools whose episodes train; a weight of 0 keeps a pool for evaluation."""
        return tuple(pool for pool in self.settings.pools if self._is_trained(pool))

    def least_group(self, pool: str) -> int:
        """Fewest members with which a group of the pool can train every model of its."""
        models = self.settings.trained_models(pool)
        return max((self.settings.models[model].algorithm.min_group for model in models), default=1)

    def check(self) -> None:
        """ConfigError when the settings can not lead to an end."""
        for pool in self.training_pools:
            size, least = self.settings.pools[pool].group_size, self.least_group(pool)
            if size < least:
                raise ConfigError(
                    f"pools.{pool}.group_size is {size}, but algorithm.min_group of its models is {least}, so "
                    "every group would be dropped; make the groups larger or min_group smaller"
                )
        evaluated = self.settings.eval.pool
        if evaluated and not self.num_eval_tasks:
            raise ConfigError(f"eval.pool: pool {evaluated} has no tasks of its own; set its `tasks`")
        if evaluated and not self.eval_models:
            raise ConfigError(
                f"eval.pool: pool {evaluated} has no trained model to evaluate; set pools.{evaluated}.models"
            )

    # What is known

    def apply(self, sequence: int, time: float, record: Record) -> None:
        """Take in the next record of LEDGER, of any chain; known ones are ignored.

        Raises:
            FencedError: A newer curriculum has started.
            RecordError: The record can not follow those before it.
        """
        is_learners = isinstance(record, LearnerStart | LearnerStep | GroupDrop)
        # Own records are taken in as soon as they are stored, ahead of others' that lie before them.
        chain = record.model if is_learners else CURRICULUM
        if sequence <= self._last_sequences.get(chain, 0):
            return
        if isinstance(record, CurriculumStart) and 0 < self.incarnation < record.incarnation:
            raise FencedError(f"a newer curriculum has taken over run {self.run}; this one stops")
        self._last_sequences[chain] = sequence
        if is_learners:
            self._learned(sequence, record)
        else:
            self.ledger.apply(sequence, record)
            if isinstance(record, GroupIssue):
                self._issued(sequence, record, time)

    def _learned(self, sequence: int, record: LearnerStart | LearnerStep | GroupDrop) -> None:
        self.learners.setdefault(record.model, LedgerView()).apply(sequence, record)
        groups = record.groups if isinstance(record, LearnerStep) else ()
        for group in (record.group,) if isinstance(record, GroupDrop) else groups:
            self.board.consume(group, record.model)

    def _issued(self, sequence: int, record: GroupIssue, time: float) -> None:
        self.board.issue(record, time)
        if record.client_group:
            self._client_groups[record.pool, record.client_group] = sequence
        if record.retry_of:
            self._retries[record.retry_of] = group_id(record.pool, record.index)
            self._owed.pop(record.retry_of, None)
        if record.kind is EpisodeKind.TRAIN:
            self._mix.record(record.pool)
            self.streaks.issued(record.pool, time)
            self._wanted.pop(record.pool, None)
            if record.position >= 0 and not record.retry_of:
                self._positions[record.pool] = record.position + 1

    def task_of(self, issue: GroupIssue) -> Mapping[str, Any]:
        """The task of an issued group: a client's own, or that of the data set (empty when the pool is gone)."""
        if issue.task is not None:
            return issue.task
        order = self.orders.get(issue.pool)
        if order is None:
            return {}
        return order.in_file_order(issue.position) if issue.kind is EpisodeKind.EVAL else order.task(issue.position)

    def client_issue(self, pool: str, client_group: str) -> int | None:
        """LEDGER sequence of the group that a client's name stands for, if it was issued."""
        return self._client_groups.get((pool, client_group))

    def retry_of(self, group: str) -> GroupId | None:
        """The group that plays a dead group's task again, if it was issued."""
        return self._retries.get(group)

    def owe(self, dead: GroupIssue) -> None:
        """A group's task is to be played again: its retry comes before new tasks of its pool."""
        self._owed.setdefault(group_id(dead.pool, dead.index), dead)

    def load(self, model: str) -> ModelLoad:
        """The state of a model's admission."""
        view, learner = self.learners[model], self.settings.models[model].learner
        is_evaluated = self._plan is not None and model in self.eval_models
        return ModelLoad(
            batch_groups=learner.batch_groups,
            admission_bound=learner.admission_bound,
            num_steps=view.num_steps,
            num_trained=view.num_groups,
            num_issued=self.ledger.num_issued(model),
            num_dropped=view.num_dropped,
            last_step=self.settings.run.num_steps or None,
            barrier_step=self.next_evaluation if is_evaluated else None,
        )

    # Training

    def room(self, pool: str) -> int:
        """Groups of a pool that may be issued now."""
        return min((self.load(model).room for model in self.settings.trained_models(pool)), default=0)

    def _position(self, pool: str) -> int:
        return self._positions.get(pool, 0)

    def _owed_to(self, pool: str) -> tuple[str, GroupIssue] | None:
        return next(((group, issue) for group, issue in self._owed.items() if issue.pool == pool), None)

    def _has_next_task(self, pool: str) -> bool:
        order = self.orders.get(pool)
        return self._owed_to(pool) is not None or (order is not None and order.has(self._position(pool)))

    def _may_go_on(self, pool: str, now: float) -> bool:
        """Whether the pool has a task to issue, and is not held up by failures; clients' own tasks never are."""
        if not self._has_next_task(pool):
            return False
        if not self.streaks.is_stopping(pool):
            return True
        outs = (out for out in self.board.groups.values() if out.is_training and out.issue.pool == pool)
        return self.streaks.is_probe_due(pool, now) and not any(out.open_members for out in outs)

    def _eligible(self, now: float) -> list[str]:
        self._wanted = {pool: at for pool, at in self._wanted.items() if now - at < OFFER_MEMORY_SECONDS}
        return [
            pool
            for pool in self.training_pools
            if (self._may_go_on(pool, now) or pool in self._wanted) and self.room(pool)
        ]

    def next_training(self, now: float) -> GroupIssue | None:
        """The group to issue now, or None: no room, no task, or it is the turn of a client that was refused before."""
        pool = self._mix.pick(self._eligible(now))
        if pool is None or not self._may_go_on(pool, now):
            return None
        owed = self._owed_to(pool)
        if owed is not None:
            group, dead = owed
            return self._issue(pool, position=dead.position, size=dead.size, seed=dead.seed, retry_of=group)
        return self._issue(pool, position=self._position(pool), size=self.settings.pools[pool].group_size)

    def offered(self, request: OfferRequest, now: float) -> GroupIssue | None:
        """The group of a client's own task, or None while there is no room for it; the room is kept for a while."""
        self._wanted[request.pool] = now
        if self._mix.pick(self._eligible(now)) != request.pool:
            return None
        return self._issue(
            request.pool,
            position=-1,
            size=request.size,
            task=dict(request.task),
            client_group=request.group,
            max_offers=1,
        )

    def _issue(self, pool: str, *, position: int, size: int, **fields: Any) -> GroupIssue:
        one, index = self.settings.pools[pool], self.ledger.next_index(pool)
        models = self.settings.trained_models(pool)
        common: dict[str, Any] = {
            "kind": EpisodeKind.TRAIN,
            "seed": task_seed(self.settings.run.seed, pool, index),
            "models": models,
            "ranks": {model: self.ledger.num_issued(model) for model in models},
            "sampling": one.sampling,
            "max_offers": one.max_offers,
        }
        return GroupIssue(
            run=self.run,
            pool=pool,
            index=index,
            position=position,
            size=size,
            deadline_seconds=one.deadline_seconds,
            **(common | fields),
        )

    # Evaluation

    @property
    def eval_models(self) -> tuple[str, ...]:
        """Trained models that the evaluation plays."""
        pool = self.settings.eval.pool
        return self.settings.trained_models(pool) if pool else ()

    @property
    def _eval_steps(self) -> int:
        return max((self.learners[model].num_steps for model in self.eval_models), default=0)

    @property
    def num_eval_tasks(self) -> int:
        """Groups of one evaluation."""
        order = self.orders.get(self.settings.eval.pool)
        return 0 if order is None else min(self.settings.eval.num_tasks, len(order))

    @property
    def next_evaluation(self) -> int | None:
        """Step of the next evaluation that has not settled."""
        return None if self._plan is None else self._plan.next_step(self._eval_steps, self._is_evaluated)

    def _valid_evaluations(self, step: int) -> Iterator[tuple[GroupIssue, bool]]:
        for issue, out in self.board.evaluations.get(step, ()):
            pins = issue.pins.items()
            if all(self.learners[model].is_valid(Version.parse(pin)) for model, pin in pins if model in self.learners):
                yield issue, not out.open_members

    def _is_evaluated(self, step: int) -> bool:
        found = {issue.position: is_closed for issue, is_closed in self._valid_evaluations(step)}
        return len(found) >= self.num_eval_tasks and all(found.values())

    def evaluation_due(self) -> int | None:
        """Step of the evaluation that has to be issued or is being played; None while training goes on."""
        if self._plan is None or not all(self.load(model).is_idle for model in self.eval_models):
            return None
        steps, step = self._eval_steps, self.next_evaluation
        if step is not None and steps >= step:
            return step
        if self._is_training_over and not self._is_evaluated(steps):
            return steps
        return None

    def next_evaluation_group(self) -> GroupIssue | None:
        """The next group of the evaluation that is due; None when there is none, or a model has no learner yet."""
        step, heads = self.evaluation_due(), {model: self.learners[model].head for model in self.eval_models}
        if step is None or None in heads.values():
            return None
        issued = {issue.position for issue, _ in self._valid_evaluations(step)}
        position = next((place for place in range(self.num_eval_tasks) if place not in issued), None)
        if position is None:
            return None
        evaluation = self.settings.eval
        return self._issue(
            evaluation.pool,
            position=position,
            size=evaluation.num_repeats,
            kind=EpisodeKind.EVAL,
            seed=evaluation.seed + position,
            models=self.eval_models,
            ranks={},
            pins={model: str(head) for model, head in heads.items()},
            sampling=evaluation.sampling,
            eval_step=step,
        )

    def open_episodes(self, step: int) -> tuple[int, int]:
        """How many of an evaluation's episodes are open, and how many it has."""
        outs = [out for _, out in self.board.evaluations.get(step, ())]
        return sum(len(out.open_members) for out in outs), sum(out.issue.size for out in outs)

    # The end

    def is_final(self, pool: str) -> bool:
        """Whether all groups that a model of the pool still trains are out."""
        return any(self.load(model).is_final for model in self.settings.trained_models(pool))

    def _is_exhausted(self, pool: str) -> bool:
        if self.is_final(pool):
            return True
        return pool in self.orders and not self._has_next_task(pool)

    @property
    def _is_training_over(self) -> bool:
        models = {model for pool in self.training_pools for model in self.settings.trained_models(pool)}
        return (
            all(self._is_exhausted(pool) for pool in self.training_pools)
            and not self.board.has_open_training
            and all(self.load(model).is_idle for model in models)
        )

    def finish_reason(self) -> str | None:
        """Why the run is over, or None while it is not."""
        if not self._is_training_over or self.evaluation_due() is not None:
            return None
        if all(self.load(model).is_done for model in self.trained_models):
            return f"every model has taken its {self.settings.run.num_steps} steps"
        return "every pool has run out of tasks"


def load_orders(settings: SwarmSettings, load_tasks: Callable[[str], list[dict[str, Any]]]) -> dict[str, TaskOrder]:
    """The data set of each pool that has one; TaskDataError as `load_tasks` raises it."""
    return {
        pool: _order(settings, pool, one, load_tasks(one.tasks)) for pool, one in settings.pools.items() if one.tasks
    }


def _order(settings: SwarmSettings, pool: str, one: PoolSettings, tasks: list[dict[str, Any]]) -> TaskOrder:
    seed = f"{settings.run.seed}:{pool}"
    return TaskOrder(tasks, seed=seed, is_shuffled=one.is_shuffled, num_epochs=one.num_epochs)

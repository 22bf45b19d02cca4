"""What comes next in a run, decided from its ledger and scores alone.

Pure: the same records in the same order lead to the same decisions, so a restarted curriculum goes on where the ledger
ends. The rules are those of `agentjet.accounting.admission` (room, mix) and `agentjet.curriculum.evaluation`.
"""

from collections.abc import Mapping
from typing import Any

from agentjet.accounting.admission import ModelLoad, PoolMix
from agentjet.accounting.ledger import CurriculumView, LedgerView
from agentjet.config.settings import SwarmSettings
from agentjet.curriculum.board import Board
from agentjet.curriculum.dataset import TaskOrder, task_seed
from agentjet.curriculum.evaluation import Evaluation
from agentjet.curriculum.reoffer import Reoffers
from agentjet.curriculum.streak import streaks_of
from agentjet.errors import ConfigError, FencedError
from agentjet.schemas.claim import OfferRequest
from agentjet.schemas.ids import GroupId, RunId, group_id
from agentjet.schemas.ledger import CurriculumStart, GroupDrop, GroupIssue, LearnerStart, LearnerStep
from agentjet.schemas.record import Record
from agentjet.schemas.score import Score
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
        pauses = {pool: one.reoffer_pause_seconds for pool, one in settings.pools.items()}
        self.reoffers = Reoffers(self.board, self.streaks, pauses)
        self.incarnation = 0
        self._mix = PoolMix({pool: one.weight for pool, one in settings.pools.items() if self._is_trained(pool)})
        self._positions: dict[str, int] = {}
        self._client_groups: dict[tuple[str, str], int] = {}
        self._wanted: dict[str, float] = {}
        self._retries: dict[str, GroupId] = {}
        self._owed: dict[str, GroupIssue] = {}
        self._last_sequences: dict[str, int] = {}
        order = orders.get(settings.eval.pool)
        num_tasks = 0 if order is None else min(settings.eval.num_tasks, len(order))
        self.evaluation = Evaluation(settings, self.board, self.learners, num_tasks)

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
        evaluated = self.evaluation.pool
        if evaluated and not self.evaluation.num_tasks:
            raise ConfigError(f"eval.pool: pool {evaluated} has no tasks of its own; set its `tasks`")
        if evaluated and not self.evaluation.models:
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

    def scored(self, score: Score, time: float) -> bool:
        """Take in the next score, stored at a JetStream time; whether something else may be possible now.

        A single slot decides nothing: room comes from the ledger, ends from whole groups. But slots that are paused
        hang on each score.
        """
        self.streaks.score(score, time)
        again = self.board.score(score)
        if again is not None:
            self.reoffers.add(again, time)
        return bool(self.board.paused) or not self.board.has_open_members(score.ticket.group)

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

    def why_hopeless(self, issue: GroupIssue) -> str | None:
        """Why nobody can play a group's tickets any more, or None."""
        if issue.pool not in self.settings.pools:
            return f"its pool {issue.pool} is no longer configured"
        if self.evaluation.is_void(issue):
            return "the weights that it was to evaluate are gone with steps that the learner lost"
        return None

    def load(self, model: str) -> ModelLoad:
        """The state of a model's admission."""
        view, learner = self.learners[model], self.settings.models[model].learner
        return ModelLoad(
            batch_groups=learner.batch_groups,
            admission_bound=learner.admission_bound,
            num_steps=view.num_steps,
            num_trained=view.num_groups,
            num_issued=self.ledger.num_issued(model),
            num_dropped=view.num_dropped,
            last_step=self.settings.run.num_steps or None,
            barrier_step=self.evaluation.next_step if model in self.evaluation.models else None,
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
            "is_judged": bool(one.group_judge),
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

    def evaluation_due(self) -> int | None:
        """Step of the evaluation that has to be issued or is being played; None while training goes on."""
        if not all(self.load(model).is_idle for model in self.evaluation.models):
            return None
        step = self.evaluation.reached_step
        return self.evaluation.closing_step if step is None and self._is_training_over else step

    def next_evaluation_group(self) -> GroupIssue | None:
        """The next group of the evaluation that is due; None when there is none, or a model has no learner yet."""
        step = self.evaluation_due()
        position = None if step is None else self.evaluation.next_place(step)
        pins = None if step is None else self.evaluation.pins(step)
        if position is None or pins is None:
            return None
        of = self.settings.eval
        return self._issue(
            of.pool,
            position=position,
            size=of.num_repeats,
            kind=EpisodeKind.EVAL,
            seed=of.seed + position,
            models=self.evaluation.models,
            ranks={},
            pins=pins,
            sampling=of.sampling,
            eval_step=step,
        )

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

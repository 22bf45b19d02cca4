"""Steps derived again from the log: the same samples, in the same batches, to the same weights.

A learner is a pure fold over SAMPLES, so a checkpoint and the log give every later step once more. In deterministic
mode on a CPU the weights come out with the same bits; LEDGER holds their digests to compare with. What LEDGER has
voided is not replayed: it was taken again later in the surviving line.

Replaying writes nothing to the bus.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentjet.accounting.ledger import CurriculumView, LedgerView
from agentjet.bus.ledger import LedgerChain
from agentjet.bus.protocol import Bus
from agentjet.bus.record import read
from agentjet.config import SwarmSettings
from agentjet.config.load import config_digest
from agentjet.durable.manifest import read_manifest
from agentjet.errors import CheckpointError, ConfigError
from agentjet.pretrained.model_file import resolve
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.ledger import LearnerStep
from agentjet.schemas.sample import SlotRecord
from agentjet.schemas.subject import Stream, stream_name
from agentjet.training.batch_source import BatchSource, SampleBatch
from agentjet.training.state import load_state
from agentjet.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step beside its LEDGER record."""

    step: int
    version: str
    is_same_batch: bool
    """Whether the fold formed the batch that LEDGER says was trained."""
    logged_digest: str
    digest: str

    @property
    def is_identical(self) -> bool:
        """Same batch and, bit for bit, same weights."""
        return self.is_same_batch and self.digest == self.logged_digest


class Replay:
    """The steps of one model after a base.

    Args:
        bus: Where the log is.
        run: The run.
        model: Whose steps.
        settings: Those that the run was trained with.
        base: Folder of a checkpoint of the run; None begins with the initial weights.
    """

    def __init__(self, bus: Bus, run: RunId, model: str, settings: SwarmSettings, base: Path | None) -> None:
        self._bus, self._run, self._model, self._settings, self._base = bus, run, model, settings, base
        self._of = settings.models[model]

    async def steps(self) -> AsyncIterator[ReplayedStep]:
        """Each step after the base that LEDGER holds, as it is derived.

        Raises:
            CheckpointError: The base is not of this run and model, or was voided, or its samples were purged.
            ConfigError: The run was trained with other settings.
        """
        logged, curriculum = await self._ledger()
        trainer, source = await asyncio.to_thread(self._restore)
        step = source.fold.num_steps
        self._check_base(logged, step)
        await self._check_log(source.start)
        wanted = logged[step:]
        async for ready in self._batches(source, curriculum):
            if not wanted:
                return
            result = await asyncio.to_thread(trainer.step, ready.samples, policy_step=step)
            step += 1
            yield _compared(wanted.pop(0), tuple(member.slot for member in ready.batch.members), result.digest)
        if wanted:
            raise CheckpointError(
                f"SAMPLES gives no batch for step {wanted[0].step} of model {self._model}, which LEDGER holds: "
                "the log lost its end"
            )

    async def _ledger(self) -> tuple[list[LearnerStep], CurriculumView]:
        """The steps that count, in order, and what the curriculum issued."""
        learner, curriculum = LedgerView(), CurriculumView()
        for sequence, record in await LedgerChain(self._bus, self._run, subject.CURRICULUM).load():
            curriculum.apply(sequence, record)
        chain = await LedgerChain(self._bus, self._run, self._model).load()
        for sequence, record in chain:
            learner.apply(sequence, record)
        if learner.start is None:
            raise CheckpointError(f"no learner of model {self._model} has started in run {self._run}")
        if learner.start.config_digest != config_digest(self._settings):
            raise ConfigError(
                f"run {self._run} was trained with other settings than these; replay with the swarm.toml of the run"
            )
        records = {sequence: record for sequence, record in chain if isinstance(record, LearnerStep)}
        return [records[taken.sequence] for taken in learner.steps], curriculum

    def _restore(self) -> tuple[Trainer, BatchSource]:
        trainer = make_trainer(self._settings, self._model)
        state = load_state(trainer, self._base)["fold"] if self._base else None
        return trainer, BatchSource(self._of.learner, self._of.algorithm, state)

    def _check_base(self, logged: Sequence[LearnerStep], step: int) -> None:
        if self._base is None:
            return
        manifest = read_manifest(self._base)
        if manifest.run != self._run or manifest.model != self._model:
            raise CheckpointError(f"{self._base} is of model {manifest.model} in run {manifest.run}, not of this one")
        if step > len(logged) or (step and _version(logged[step - 1]) != manifest.version):
            raise CheckpointError(f"{self._base}: version {manifest.version} was voided; take a checkpoint that counts")

    async def _check_log(self, start: int) -> None:
        info = await self._bus.stream_info(stream_name(self._run, Stream.SAMPLES))
        if info.first_sequence > start:
            raise CheckpointError(
                f"the samples {start} to {info.first_sequence - 1} after the base were purged; take a newer checkpoint"
            )

    async def _batches(self, source: BatchSource, curriculum: CurriculumView) -> AsyncIterator[SampleBatch]:
        name, of = stream_name(self._run, Stream.SAMPLES), subject.samples_of(self._run, self._model)
        async for message in self._bus.scan(name, of, start=source.start):
            record = await read(self._bus, self._run, Stream.SAMPLES, message)
            if isinstance(record, SlotRecord):
                source.take(message.sequence, record)
            source.pop_drops()
            while (ready := source.pop_batch()) is not None:
                yield ready
        if curriculum.finish is not None:
            source.fold.finish(curriculum.num_issued(self._model))
        while (ready := source.pop_batch()) is not None:
            yield ready


def make_trainer(settings: SwarmSettings, model: str) -> Trainer:
    """The trainer of a model as the settings describe it, with the initial weights."""
    of = settings.models[model]
    return Trainer(
        resolve(of.path),
        of.learner,
        of.algorithm,
        lora=of.lora,
        seed=settings.run.seed,
        num_steps=settings.run.num_steps,
        engine_dtype=of.engine.dtype,
        is_deterministic=settings.run.is_deterministic,
    )


def _compared(logged: LearnerStep, members: tuple[str, ...], digest: str) -> ReplayedStep:
    return ReplayedStep(
        step=logged.step,
        version=_version(logged),
        is_same_batch=members == logged.members,
        logged_digest=logged.digest,
        digest=digest,
    )


def _version(logged: LearnerStep) -> str:
    return str(Version(logged.incarnation, logged.step))

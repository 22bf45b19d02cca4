"""A learner's life over the bus: batches, steps, checkpoints, restarts. The model is real, tiny and random."""

import asyncio
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from learner_run import (
    MODEL,
    after_step,
    has_weights,
    ledger,
    living,
    put_group,
    put_slot,
    sample,
    settings,
    steps,
    until,
    with_checkpoint,
)
from made_issue import group_issue as made

from agentjet.bus.memory import MemoryBus
from agentjet.bus.presence import renew
from agentjet.bus.record import put, stream_specs
from agentjet.config import CheckpointSettings
from agentjet.errors import CheckpointError, FencedError
from agentjet.schemas import subject
from agentjet.schemas.codec import encode
from agentjet.schemas.ids import GroupId, RunId, new_run_id, slot_id
from agentjet.schemas.ledger import (
    CurriculumStart,
    DropReason,
    GroupDrop,
    GroupIssue,
    LearnerStart,
    RunFinish,
)
from agentjet.schemas.presence import Presence
from agentjet.schemas.sample import Sample, Tombstone, TombstoneReason
from agentjet.schemas.subject import Stream, stream_name
from agentjet.training.incarnation import Incarnation


async def test_two_groups_make_a_step_and_its_weights(memory_bus: MemoryBus, run, tmp_path: Path, model_folder: Path):
    async with living(memory_bus, run, settings(tmp_path, model_folder)):
        await put_group(memory_bus, run, 0)
        await put_group(memory_bus, run, 1)
        await until(after_step(memory_bus, run, 1))
        await until(lambda: has_weights(memory_bus, run, "1-1"))
    (step,) = await steps(memory_bus, run)
    assert step.groups == ("guess-0", "guess-1")
    assert set(step.members) == {slot_id(GroupId(f"guess-{group}"), member) for group in (0, 1) for member in (0, 1)}
    assert not step.is_skipped
    assert step.metrics["reward_mean"] == 0.5
    assert step.metrics["agreement_num_tokens"] == 12, (
        "before its first step a learner compares the engines with itself"
    )


async def test_a_constant_group_is_dropped_and_written_down(memory_bus, run, tmp_path: Path, model_folder: Path):
    async with living(memory_bus, run, settings(tmp_path, model_folder)):
        await put_group(memory_bus, run, 0, (1.0, 1.0))
        await put_group(memory_bus, run, 1)
        await put_group(memory_bus, run, 2)
        await until(after_step(memory_bus, run, 1))
    drops = [one for one in await ledger(memory_bus, run) if isinstance(one, GroupDrop)]
    assert [(drop.group, drop.reason) for drop in drops] == [("guess-0", DropReason.CONSTANT)]
    assert (await steps(memory_bus, run))[0].groups == ("guess-1", "guess-2")


async def test_r7_a_group_with_one_survivor_is_counted_not_trained(memory_bus, run, tmp_path, model_folder: Path):
    async with living(memory_bus, run, settings(tmp_path, model_folder)):
        await put_slot(memory_bus, run, sample(run, 0, 0, 1.0))
        lost = {"reason": TombstoneReason.DEAD, **fields_of_slot(sample(run, 0, 1, 0.0))}
        await put_slot(memory_bus, run, Tombstone.model_validate(lost))
        await put_group(memory_bus, run, 1)
        await put_group(memory_bus, run, 2)
        await until(after_step(memory_bus, run, 1))
    drops = [one for one in await ledger(memory_bus, run) if isinstance(one, GroupDrop)]
    assert [drop.reason for drop in drops] == [DropReason.TOO_FEW]


def fields_of_slot(record: Sample) -> dict[str, object]:
    names = ("run", "model", "ticket", "group", "member", "rank", "group_size")
    return {name: getattr(record, name) for name in names}


async def test_a4_after_a_kill_every_group_is_trained_exactly_once(memory_bus, run, tmp_path, model_folder: Path):
    of = settings(tmp_path, model_folder)
    async with living(memory_bus, run, of, crashes=True):
        await put_group(memory_bus, run, 0)
        await put_group(memory_bus, run, 1)
        await until(with_checkpoint(memory_bus, run, "1-1"))
        await put_group(memory_bus, run, 2)
    async with living(memory_bus, run, of, name="two"):
        for group in (3, 4, 5, 6, 7):
            await put_group(memory_bus, run, group)
        await until(after_step(memory_bus, run, 4, incarnation=2))
    trained = [group for step in await steps(memory_bus, run) for group in step.groups]
    assert sorted(trained) == [f"guess-{group}" for group in range(8)]


async def test_a_resumed_step_has_the_bits_of_the_uninterrupted_one(memory_bus, run, tmp_path, model_folder: Path):
    other_run = new_run_id("whole")
    for spec in stream_specs(other_run, max_bytes=2**30):
        await memory_bus.ensure_stream(spec)
    async with living(memory_bus, other_run, settings(tmp_path / "whole", model_folder)):
        for group in range(4):
            await put_group(memory_bus, other_run, group)
        await until(after_step(memory_bus, other_run, 2))
    of = settings(tmp_path / "cut", model_folder)
    async with living(memory_bus, run, of, crashes=True):
        await put_group(memory_bus, run, 0)
        await put_group(memory_bus, run, 1)
        await until(with_checkpoint(memory_bus, run, "1-1"))
    async with living(memory_bus, run, of, name="two"):
        await put_group(memory_bus, run, 2)
        await put_group(memory_bus, run, 3)
        await until(after_step(memory_bus, run, 2, incarnation=2))
    whole, cut = await steps(memory_bus, other_run), await steps(memory_bus, run)
    assert [step.digest for step in whole] == [step.digest for step in cut]
    assert whole[0].digest != whole[1].digest


async def test_a19_a_record_below_the_checkpoint_s_position_is_trained_once(memory_bus, run, tmp_path, model_folder):
    of = settings(tmp_path, model_folder)
    async with living(memory_bus, run, of, crashes=True):
        await put_slot(memory_bus, run, sample(run, 2, 0, 1.0))
        await put_group(memory_bus, run, 0)
        await put_group(memory_bus, run, 1)
        await until(with_checkpoint(memory_bus, run, "1-1"))
    async with living(memory_bus, run, of, name="two"):
        await put_slot(memory_bus, run, sample(run, 2, 1, 0.0))
        await put_group(memory_bus, run, 3)
        await until(after_step(memory_bus, run, 2, incarnation=2))
    assert (await steps(memory_bus, run))[-1].members == ("guess-2.0", "guess-2.1", "guess-3.0", "guess-3.1")


async def test_a20_steps_after_the_checkpoint_are_voided_and_taken_again(memory_bus, run, tmp_path, model_folder):
    of = settings(tmp_path, model_folder)
    of = of.model_copy(update={"checkpoint": CheckpointSettings(every_steps=2, keep=5)})
    async with living(memory_bus, run, of, crashes=True):
        for group in range(6):
            await put_group(memory_bus, run, group)
        await until(with_checkpoint(memory_bus, run, "1-2"))
        await until(after_step(memory_bus, run, 3))
    smaller = settings(tmp_path, model_folder, batch_groups=1)
    async with living(memory_bus, run, smaller, name="two"):
        await until(after_step(memory_bus, run, 4, incarnation=2))
    starts = [one for one in await ledger(memory_bus, run) if isinstance(one, LearnerStart)]
    assert [(one.incarnation, one.base_step) for one in starts] == [(1, 0), (2, 2)]
    again = [step.groups for step in await steps(memory_bus, run) if step.incarnation == 2]
    assert again == [("guess-4",), ("guess-5",)]


async def test_a_second_learner_stops_the_first_at_its_next_append(memory_bus, run, tmp_path, model_folder: Path):
    of = settings(tmp_path, model_folder)
    async with living(memory_bus, run, of) as first:
        await until(lambda: has_weights(memory_bus, run, "1-0"))
        async with living(memory_bus, run, of, name="two"):
            await until(lambda: has_weights(memory_bus, run, "2-0"))
            await put_group(memory_bus, run, 0)
            await put_group(memory_bus, run, 1)
            await until(after_step(memory_bus, run, 1, incarnation=2))
            with pytest.raises(BaseExceptionGroup) as fenced:
                await first
            assert fenced.group_contains(FencedError, match="taken over")
    assert [step.incarnation for step in await steps(memory_bus, run)] == [2]


async def test_a_learner_refuses_to_start_beside_a_living_one(
    memory_bus, run, tmp_path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agentjet.training.incarnation.PREDECESSOR_SECONDS", 0.1)
    alive = Presence(
        run=run, actor="learner", name="other", models=(MODEL,), host="far", pid=7, started=0.0, state="busy"
    )
    await memory_bus.put_presence(subject.presence_bucket(run), "learner.other", encode(alive)[1], ttl_seconds=60)
    with pytest.raises(FencedError, match=r"alive on far \(pid 7\)"):
        await Incarnation(memory_bus, run, MODEL, settings(tmp_path, model_folder), name="one").run()
    assert await ledger(memory_bus, run) == []


async def test_a_learner_does_not_wait_for_the_heartbeat_of_a_killed_one(
    memory_bus, run, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agentjet.training.incarnation.PREDECESSOR_SECONDS", 0.0)
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
    dead = Presence(
        run=run,
        actor="learner",
        name="other",
        models=(MODEL,),
        host=socket.gethostname(),
        pid=killed.pid,
        started=0.0,
        state="busy",
    )
    await renew(memory_bus, dead)
    of = settings(tmp_path, model_folder)
    with pytest.raises(FencedError, match=f"pid {killed.pid}"):
        await Incarnation(memory_bus, run, MODEL, of, name="one").run()
    killed.kill()
    await killed.wait()
    async with living(memory_bus, run, of):
        await until(lambda: has_weights(memory_bus, run, "1-0"))


async def test_a_log_that_lost_its_end_is_refused(memory_bus, run, tmp_path: Path, model_folder: Path):
    of = settings(tmp_path, model_folder)
    async with living(memory_bus, run, of):
        await put_group(memory_bus, run, 0)
        await put_group(memory_bus, run, 1)
        await until(with_checkpoint(memory_bus, run, "1-1"))
    name = stream_name(run, Stream.SAMPLES)
    await memory_bus.delete_stream(name)
    (spec,) = [spec for spec in stream_specs(run, max_bytes=2**30) if spec.name == name]
    await memory_bus.ensure_stream(spec)
    with pytest.raises(FencedError, match="lost its end"):
        await Incarnation(memory_bus, run, MODEL, of, name="two").run()


async def test_a_learner_whose_checkpoints_are_gone_with_their_samples_purged_is_refused(
    memory_bus, run, tmp_path: Path, model_folder: Path
):
    sequence = await put_slot(memory_bus, run, sample(run, 0, 0, 1.0))
    await put_slot(memory_bus, run, sample(run, 0, 1, 0.0))
    await memory_bus.purge(stream_name(run, Stream.SAMPLES), below_sequence=sequence + 1)
    with pytest.raises(CheckpointError, match="the samples 1 to 1 after it were purged"):
        await Incarnation(memory_bus, run, MODEL, settings(tmp_path, model_folder), name="one").run()
    assert await ledger(memory_bus, run) == []


async def test_a_stopped_learner_leaves_a_checkpoint_of_its_last_step(memory_bus, run, tmp_path, model_folder: Path):
    of = settings(tmp_path, model_folder).model_copy(update={"checkpoint": CheckpointSettings(every_steps=0)})
    async with living(memory_bus, run, of):
        await put_group(memory_bus, run, 0)
        await put_group(memory_bus, run, 1)
        await until(after_step(memory_bus, run, 1))
    async with living(memory_bus, run, of, name="two"):
        await put_group(memory_bus, run, 2)
        await put_group(memory_bus, run, 3)
        await until(after_step(memory_bus, run, 2, incarnation=2))
    starts = [one for one in await ledger(memory_bus, run) if isinstance(one, LearnerStart)]
    assert [one.base_step for one in starts] == [0, 1]


async def test_a_damaged_checkpoint_that_was_set_aside_does_not_stop_the_next_learner(
    memory_bus, run, tmp_path, model_folder: Path
):
    of = settings(tmp_path, model_folder)
    async with living(memory_bus, run, of, crashes=True):
        await put_group(memory_bus, run, 0)
        await put_group(memory_bus, run, 1)
        await until(with_checkpoint(memory_bus, run, "1-1"))
    folder = tmp_path / "checkpoints" / MODEL
    (folder / "1-1").rename(folder / "1-1.damaged-1")
    async with living(memory_bus, run, of, name="two"):
        await until(after_step(memory_bus, run, 1, incarnation=2))


async def test_an_idle_learner_says_which_groups_it_waits_for(memory_bus, run, tmp_path, model_folder: Path):
    incarnation = Incarnation(memory_bus, run, MODEL, settings(tmp_path, model_folder), name="one")
    task = asyncio.create_task(incarnation.run())
    await until(lambda: says(incarnation, "samples for step 1"))
    since = incarnation.waiting()[0].since
    await put_group(memory_bus, run, 2)
    await until(lambda: says(incarnation, "samples for step 1 (groups not complete: 2, the first of rank 0)"))
    assert incarnation.waiting()[0].since == since
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def says(incarnation: Incarnation, what: str) -> bool:
    return incarnation.waiting()[0].what == what


@pytest.mark.parametrize(("damaged", "base_step"), [(("1-2",), 1), (("1-1", "1-2"), 0)])
async def test_a_checkpoint_damaged_after_it_was_named_is_set_aside_and_the_one_before_it_taken(
    memory_bus, run, tmp_path, model_folder: Path, damaged: tuple[str, ...], base_step: int
):
    of = settings(tmp_path, model_folder)
    async with living(memory_bus, run, of, crashes=True):
        for group in range(4):
            await put_group(memory_bus, run, group)
        await until(with_checkpoint(memory_bus, run, "1-2"))
    folder = tmp_path / "checkpoints" / MODEL
    for version in damaged:
        weights = folder / version / "model.safetensors"
        weights.write_bytes(b"\0" * weights.stat().st_size)
    async with living(memory_bus, run, of, name="two"):
        await until(after_step(memory_bus, run, 2, incarnation=2))
    starts = [one for one in await ledger(memory_bus, run) if isinstance(one, LearnerStart)]
    assert [one.base_step for one in starts] == [0, base_step]
    assert {path.name for path in folder.glob("*.damaged-1")} == {f"{version}.damaged-1" for version in damaged}


async def test_a_checkpoint_of_another_architecture_stays_and_stops_the_learner(
    memory_bus, run, tmp_path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    of = settings(tmp_path, model_folder)
    async with living(memory_bus, run, of, crashes=True):
        await put_group(memory_bus, run, 0)
        await put_group(memory_bus, run, 1)
        await until(with_checkpoint(memory_bus, run, "1-1"))
    monkeypatch.setattr("agentjet.training.state._architecture", lambda _: "another one")
    with pytest.raises(CheckpointError, match="the run trains a"):
        await Incarnation(memory_bus, run, MODEL, of, name="two").run()
    assert (tmp_path / "checkpoints" / MODEL / "1-1").is_dir()


async def test_a_batch_that_was_formed_before_the_checkpoint_is_trained_after_a_kill(
    memory_bus, run, tmp_path, model_folder: Path
):
    """The record of a late group completes two batches at once; the second waits while the first is trained."""
    of = settings(tmp_path, model_folder)
    async with living(memory_bus, run, of, crashes=True):
        for group in (1, 2, 3, 0):
            await put_group(memory_bus, run, group)
        await until(with_checkpoint(memory_bus, run, "1-2"))
    shutil.rmtree(tmp_path / "checkpoints" / MODEL / "1-2")
    async with living(memory_bus, run, of, name="two"):
        await until(after_step(memory_bus, run, 2, incarnation=2))
    starts = [one for one in await ledger(memory_bus, run) if isinstance(one, LearnerStart)]
    assert [one.base_step for one in starts] == [0, 1]
    assert [step.groups for step in await steps(memory_bus, run)][-1] == ("guess-2", "guess-3")


async def test_a_run_that_goes_on_waits_for_whole_batches_again(memory_bus, run, tmp_path, model_folder: Path):
    """The end of the run before stands in the ledger for ever, and says nothing about the groups after it."""
    of = settings(tmp_path, model_folder)
    to = subject.ledger(run, subject.CURRICULUM)
    for record in (
        RunFinish(run=run, reason="every model has taken its 0 steps"),
        CurriculumStart(run=run, incarnation=1, config_digest=""),
        *(group_issue(run, index) for index in range(3)),
    ):
        await put(memory_bus, run, Stream.LEDGER, to, record)
    async with living(memory_bus, run, of):
        await until(lambda: has_weights(memory_bus, run, "1-0"))
        for group, rewards in enumerate(((1.0, 1.0), (1.0, 1.0), (1.0, 0.0))):
            await put_group(memory_bus, run, group, rewards)
        await asyncio.sleep(0.3)
        await put_group(memory_bus, run, 3)
        await until(after_step(memory_bus, run, 1))
    assert (await steps(memory_bus, run))[0].groups == ("guess-2", "guess-3")


def group_issue(run: RunId, index: int) -> GroupIssue:
    return made(run, index, pool="guess", seed=0, models=(MODEL,))

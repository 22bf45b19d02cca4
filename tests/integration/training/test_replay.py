"""Steps derived again from the log: same batches, same bits. The model is real, tiny and random."""

from pathlib import Path

import pytest
from learner_run import MODEL, after_step, living, put_group, settings, until, with_checkpoint

from agentjet.bus.memory import MemoryBus
from agentjet.config.place import RunPlace
from agentjet.errors import CheckpointError, ConfigError
from agentjet.schemas.ids import RunId, new_run_id
from agentjet.training.replay import Replay, ReplayedStep


async def trained(bus: MemoryBus, run: RunId, folder: Path, model: Path, crashes: bool = False, **of_model: int):
    """Three steps of two groups; optionally with a kill after the second, whose step is then taken again."""
    of = settings(folder, model, **of_model)
    async with living(bus, run, of, crashes=crashes):
        for group in range(2 if crashes else 6):
            await put_group(bus, run, group)
        await until(with_checkpoint(bus, run, "1-1"))
        if not crashes:
            await until(with_checkpoint(bus, run, "1-3"))
    if crashes:
        async with living(bus, run, of, name="two"):
            for group in range(2, 6):
                await put_group(bus, run, group)
            await until(after_step(bus, run, 3, incarnation=2))
    return of


async def replayed(replay: Replay) -> list[ReplayedStep]:
    return [step async for step in replay.steps()]


async def test_every_step_comes_out_with_the_same_bits(memory_bus, run, tmp_path: Path, model_folder: Path):
    of = await trained(memory_bus, run, tmp_path, model_folder)
    steps = await replayed(Replay(memory_bus, run, MODEL, of, None))
    assert [step.step for step in steps] == [1, 2, 3]
    assert all(step.is_identical for step in steps)
    assert len({step.digest for step in steps}) == 3


async def test_a_checkpoint_gives_the_steps_after_it(memory_bus, run, tmp_path: Path, model_folder: Path):
    of = await trained(memory_bus, run, tmp_path, model_folder)
    base = RunPlace(of.run.dir).checkpoints(MODEL) / "1-1"
    steps = await replayed(Replay(memory_bus, run, MODEL, of, base))
    assert [step.step for step in steps] == [2, 3]
    assert all(step.is_identical for step in steps)


async def test_a_run_through_a_kill_is_replayed_as_one_line(memory_bus, run, tmp_path: Path, model_folder: Path):
    of = await trained(memory_bus, run, tmp_path, model_folder, crashes=True)
    steps = await replayed(Replay(memory_bus, run, MODEL, of, None))
    assert [step.version for step in steps] == ["1-1", "2-2", "2-3"]
    assert all(step.is_identical for step in steps)


async def test_an_adapter_s_run_through_a_kill_is_replayed_as_one_line(memory_bus, run, tmp_path, model_folder: Path):
    of = await trained(memory_bus, run, tmp_path, model_folder, crashes=True, lora_rank=4)
    base = RunPlace(of.run.dir).checkpoints(MODEL) / "1-1"
    for start, versions in ((None, ["1-1", "2-2", "2-3"]), (base, ["2-2", "2-3"])):
        steps = await replayed(Replay(memory_bus, run, MODEL, of, start))
        assert [step.version for step in steps] == versions
        assert all(step.is_identical for step in steps)
    assert sum(file.stat().st_size for file in base.iterdir()) < (model_folder / "model.safetensors").stat().st_size


async def test_other_weights_are_seen(memory_bus, run, tmp_path: Path, model_folder: Path, monkeypatch):
    of = await trained(memory_bus, run, tmp_path, model_folder)
    monkeypatch.setattr("agentjet.training.trainer.weights_digest", lambda model: "other")
    steps = await replayed(Replay(memory_bus, run, MODEL, of, None))
    assert [step.is_same_batch for step in steps] == [True] * 3
    assert not any(step.is_identical for step in steps)


async def test_other_settings_are_refused(memory_bus, run, tmp_path: Path, model_folder: Path):
    await trained(memory_bus, run, tmp_path, model_folder)
    other = settings(tmp_path, model_folder, learning_rate=0.5)
    with pytest.raises(ConfigError, match="other settings"):
        await replayed(Replay(memory_bus, run, MODEL, other, None))


async def test_a_checkpoint_of_another_run_is_refused(memory_bus, run, tmp_path: Path, model_folder: Path):
    of = await trained(memory_bus, run, tmp_path, model_folder)
    base = RunPlace(of.run.dir).checkpoints(MODEL) / "1-1"
    state = base / "state.json"
    state.write_text(state.read_text().replace(run, new_run_id("other")))
    with pytest.raises(CheckpointError):
        await replayed(Replay(memory_bus, run, MODEL, of, base))

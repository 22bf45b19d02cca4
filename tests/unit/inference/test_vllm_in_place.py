"""When single weights are written, and when the whole file is loaded: with workers that follow a script."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agentjet.inference.vllm_in_place import InPlace
from agentjet.inference.weight_change import read_changes


class ScriptedWorkers:
    """Two workers, whose weights are the last file that was loaded, and the changes since."""

    def __init__(self) -> None:
        self.obstacle, self.is_exact, self.refused_by = "", True, set[int]()
        self.calls: list[str] = []
        self.weights = torch.zeros(0)
        self.snapshot_refusal = ""

    async def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(name)
        return [getattr(self, name)(worker, *args) for worker in range(2)]

    def in_place_obstacle(self, worker: int) -> str:
        return self.obstacle if worker else ""

    def change_weights(self, worker: int, path: str) -> str:
        if worker in self.refused_by:
            return "not to be seen here"
        for one in read_changes(Path(path)):
            self.weights[one.places] = one.values if self.is_exact else one.values + 1
        return ""

    def weight_sums(self, worker: int) -> list[int]:
        return self.weights.tolist()

    def load_snapshot(self, worker: int, path: str, names: list[str]) -> str:
        if not self.snapshot_refusal:
            self.weights = torch.load(Path(path).with_suffix(".pt"))
        return self.snapshot_refusal


@pytest.fixture
def workers() -> ScriptedWorkers:
    return ScriptedWorkers()


class Updates:
    """Files that differ in one value each, and an engine that loads them."""

    def __init__(self, workers: ScriptedWorkers, folder: Path) -> None:
        self.workers, self.folder, self.in_place, self.number = workers, folder, InPlace(), 0

    def file(self) -> tuple[Path, torch.Tensor]:
        weights, self.number = torch.zeros(1000), self.number + 1
        weights[: self.number] = 1.0
        path = self.folder / f"{self.number}.safetensors"
        save_file({"w": weights}, path)
        torch.save(weights, path.with_suffix(".pt"))
        return path, weights

    async def next(self) -> list[str]:
        """What the workers were asked for, for a new file."""
        (path, weights), self.workers.calls = self.file(), []
        await self.in_place.look(self.workers)
        changes = self.in_place.find(path)
        assert await self.in_place.load(self.workers, path, ["w"], changes) in ([], ["", ""])
        if changes is not None:
            changes.close()
        assert torch.equal(self.workers.weights, weights)
        return self.workers.calls


@pytest.fixture
def updates(workers: ScriptedWorkers, tmp_path: Path) -> Updates:
    return Updates(workers, tmp_path)


async def test_the_first_changes_are_proven_by_the_whole_file_and_later_ones_are_enough(updates: Updates):
    assert await updates.next() == ["in_place_obstacle", "load_snapshot"]
    assert await updates.next() == ["change_weights", "weight_sums", "load_snapshot", "weight_sums"]
    assert await updates.next() == ["change_weights"]


async def test_changes_that_do_not_lead_there_are_found_out_at_once_and_not_made_again(
    updates: Updates, workers: ScriptedWorkers
):
    workers.is_exact = False
    await updates.next()
    assert "change_weights" in await updates.next()
    assert await updates.next() == ["load_snapshot"]


async def test_weights_that_lie_in_another_form_are_loaded_whole(updates: Updates, workers: ScriptedWorkers):
    workers.obstacle = "packed"
    await updates.next()
    assert await updates.next() == ["load_snapshot"]


@pytest.mark.parametrize("refused_by", [{0}, {0, 1}])
async def test_where_a_worker_refuses_changes_all_load_the_whole_file(
    updates: Updates, workers: ScriptedWorkers, refused_by: set[int]
):
    await updates.next()
    workers.refused_by = refused_by
    assert await updates.next() == ["change_weights", "load_snapshot"]


async def test_changes_from_another_file_than_is_served_are_never_applied(updates: Updates, workers: ScriptedWorkers):
    await updates.next()
    path, weights = updates.file()
    changes = updates.in_place.find(path)
    assert changes is not None
    await updates.next()  # one that nobody waited for came to its end meanwhile
    workers.calls = []
    await updates.in_place.load(workers, path, ["w"], changes)
    changes.close()
    assert workers.calls == ["load_snapshot"]
    assert torch.equal(workers.weights, weights)


async def test_a_whole_file_that_is_refused_after_changes_were_made_is_half_a_load(
    updates: Updates, workers: ScriptedWorkers
):
    await updates.next()
    path, _ = updates.file()
    changes = updates.in_place.find(path)
    workers.refused_by, workers.snapshot_refusal = {1}, "gone"
    with pytest.raises(RuntimeError, match="can not be loaded"):
        await updates.in_place.load(workers, path, ["w"], changes)
    assert changes is not None
    changes.close()

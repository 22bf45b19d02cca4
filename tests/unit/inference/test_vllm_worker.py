"""What is mixed into vLLM's worker, on a stand-in for that class."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from agentjet.errors import EngineError
from agentjet.inference.vllm_worker import SnapshotLoader


class Model(nn.Module):
    """Loads as vLLM's models do: what has no place is left out, and what it has loaded is told."""

    def __init__(self, renamed: dict[str, str]):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.renamed = renamed

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own, loaded = dict(self.named_parameters()), set[str]()
        for stored, value in weights:
            name = self.renamed.get(stored, stored)
            if name in own:
                own[name].data.copy_(value)
                loaded.add(name)
        return loaded


class Worker(SnapshotLoader):
    def __init__(self, model: Model, quantization: str | None = None):
        self.model, self.model_config = model, SimpleNamespace(quantization=quantization)

    def get_model(self) -> Model:
        return self.model

    def reload_weights(self, *, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
        self.model.load_weights(weights_iterator)


NAMES = ["first.weight", "second.weight"]


@pytest.fixture
def snapshot(tmp_path: Path) -> str:
    path = tmp_path / "model.safetensors"
    save_file({name: torch.full((2, 2), 7.0) for name in NAMES}, path)
    return str(path)


def test_a_snapshot_is_put_in_place_and_the_models_own_loader_stays(snapshot: str):
    model = Model({})
    assert Worker(model).load_snapshot(snapshot, NAMES) == ""
    assert all(bool((value == 7).all()) for value in model.parameters())
    assert "load_weights" not in vars(model)


def test_a_tensor_that_vllm_takes_nothing_for_is_no_success(snapshot: str):
    model = Model({"second.weight": "another.weight"})
    with pytest.raises(EngineError, match=r"Model took nothing .* for 1 of its tensors \['second.weight'\]"):
        Worker(model).load_snapshot(snapshot, NAMES)
    assert "load_weights" not in vars(model)


def test_a_quantized_model_may_have_tensors_of_its_own(snapshot: str):
    assert Worker(Model({"second.weight": "another.weight"}), "fp8").load_snapshot(snapshot, NAMES) == ""


def test_a_model_that_does_not_tell_what_it_loaded_is_not_trusted(snapshot: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Model, "load_weights", lambda self, weights: None)
    with pytest.raises(EngineError, match="for 2 of its tensors"):
        Worker(Model({})).load_snapshot(snapshot, NAMES)


@pytest.mark.parametrize("names", [["absent"], [*NAMES, "absent"]])
def test_a_snapshot_without_an_announced_tensor_is_refused_before_a_weight_is_touched(names: list[str], snapshot: str):
    model = Model({})
    before = [value.clone() for value in model.parameters()]
    assert Worker(model).load_snapshot(snapshot, names) == f"weights {snapshot} lack 1 tensors ['absent']"
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_a_file_that_is_gone_is_refused(tmp_path: Path):
    assert "can not be read" in Worker(Model({})).load_snapshot(str(tmp_path / "gone.safetensors"), NAMES)

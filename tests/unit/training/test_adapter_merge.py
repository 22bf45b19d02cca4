"""An adapter's checkpoint as others load it: merged, or by itself."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentjet.cli.main import run
from agentjet.errors import CheckpointError
from agentjet.pretrained import model_file
from agentjet.training.adapter_merge import merge, merging_error
from agentjet.training.state import save_state

LORA = {"rank": 4, "alpha": 8.0}
EXTRA = {"run": "r-abcdef", "model": "m", "incarnation": 1, "step": 1, "version": "1-1"}


@pytest.fixture
def trained(make_trainer, make_batch, tmp_path: Path):
    """A trainer after a step, and its checkpoint."""
    trainer = make_trainer(lora=LORA)
    trainer.step(make_batch(0))
    folder = tmp_path / "run/checkpoints/m/1-1"
    save_state(trainer, folder, EXTRA)
    return trainer, folder


def test_the_merged_model_is_the_adapted_one(trained, make_batch, make_trainer, tmp_path, model_folder: Path):
    trainer, checkpoint = trained
    folder = merge(checkpoint, tmp_path / "out", model_folder)
    merged = make_trainer(model=folder)
    samples = make_batch(1)[0]
    for one, other in zip(trainer.logprobs(samples), merged.logprobs(samples), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    base, weights = make_trainer(), dict(merged.model.named_parameters())
    moved = {name for name, weight in base.model.named_parameters() if not torch.equal(weight, weights[name])}
    assert moved == {name for name in weights if "proj" in name}
    assert {weight.dtype for weight in load_file(folder / "model.safetensors").values()} == {torch.float32}
    assert AutoModelForCausalLM.from_pretrained(folder).dtype is torch.float32
    assert (folder / "tokenizer_config.json").is_file()
    assert not {path.name for path in folder.iterdir()} & {"adapter_config.json", "state.json", "manifest.json"}


def test_each_merged_weight_is_rounded_once(trained, tmp_path, model_folder: Path):
    trainer, checkpoint = trained
    found = load_file(merge(checkpoint, tmp_path / "out", model_folder) / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    first, second = (
        trainer.weights[f"base_model.model.{name}.{part}.weight"].detach().double() for part in ("lora_A", "lora_B")
    )
    weight = load_file(model_folder / "model.safetensors")[f"{name}.weight"].double()
    assert torch.equal(found[f"{name}.weight"], (weight + 2.0 * (second @ first)).float())


def test_merging_costs_nothing_in_float32_and_rounding_in_bfloat16(trained, tmp_path, model_folder: Path):
    _, checkpoint = trained
    errors = merging_error(checkpoint, model_folder, merge(checkpoint, tmp_path / "out", model_folder))
    exact, rough = errors["float32"], errors["bfloat16"]
    assert exact.num_tokens == rough.num_tokens > 300
    assert 0 <= exact.mean <= exact.max < 1e-4
    assert rough.max > 10 * exact.max
    assert rough.mean < 0.1


def test_an_error_in_the_merging_would_be_seen(trained, tmp_path, model_folder: Path):
    _, checkpoint = trained
    folder = merge(checkpoint, tmp_path / "out", model_folder)
    shutil.copyfile(model_folder / "model.safetensors", folder / "model.safetensors")
    assert merging_error(checkpoint, model_folder, folder)["float32"].max > 1e-3


def test_another_base_is_refused_before_anything_is_written(trained, tmp_path, model_folder: Path):
    other = Path(shutil.copytree(model_folder, tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    save_file({name: weight * 1.01 for name, weight in weights.items()}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="--base"):
        merge(trained[1], tmp_path / "out", other)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="is there already"):
        merge(trained[1], other, model_folder)


def test_the_text_is_told_in_the_model_s_own_tokens(make_trainer, tmp_path):
    folder = model_file.fetch("tiny")
    trainer = make_trainer(lora=LORA, model=folder)
    save_state(trainer, tmp_path / "s", EXTRA)
    errors = merging_error(tmp_path / "s", folder, merge(tmp_path / "s", tmp_path / "out", folder))
    assert 50 < errors["float32"].num_tokens < 400
    assert errors["float32"].max == 0.0, "a fresh adapter adds nothing"


def test_the_command_merges_and_says_what_that_does(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["checkpoint", "export", "m", "out", "--dir", "run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["path"] == "out"
    assert set(said["merging_error"]) == {"float32", "bfloat16"}
    assert set(said["merging_error"]["float32"]) == {"num_tokens", "mean", "max"}
    assert (tmp_path / "out/model.safetensors").is_file()
    assert run(["checkpoint", "export", "m", "again", "--dir", "run"]) == 0
    assert "merged against unmerged in bfloat16: log-probs of" in capsys.readouterr().out


def test_the_command_writes_the_adapter_by_itself(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["checkpoint", "export", "m/1-1", "out", "--adapter", "--dir", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": "out", "merging_error": {}}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (trained[1] / name).read_bytes()


def test_the_command_knows_a_checkpoint_without_an_adapter(make_trainer, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_state(make_trainer(), tmp_path / "run/checkpoints/m/1-1", EXTRA)
    assert run(["checkpoint", "export", "m", "out", "--adapter", "--dir", "run"]) == 2
    assert "holds all weights and no adapter; leave --adapter out" in capsys.readouterr().err

import errno
import json
import os
import shutil

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from agentjet.durable.manifest import verify_files, write_manifest
from agentjet.errors import CheckpointError
from agentjet.training import state
from agentjet.training.state import load_state, save_state


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_resumed_step_equals_the_uninterrupted_one_bit_for_bit(make_trainer, make_batch, tmp_path, minibatches):
    fields = {"num_steps": 9, "schedule": "cosine", "warmup_steps": 1, "num_minibatches": minibatches}
    straight = make_trainer(**fields)
    for seed in range(3):
        straight.step(make_batch(seed))
    save_state(straight, tmp_path / "1-3", {"step": 3, "fold": {"cursor": 17}})
    resumed = make_trainer(**fields)
    assert load_state(resumed, tmp_path / "1-3") == {"step": 3, "fold": {"cursor": 17}}
    assert resumed.digest == straight.digest
    for seed in range(3, 6):
        one, other = straight.step(make_batch(seed)), resumed.step(make_batch(seed))
        assert one.digest == other.digest
        assert one.metrics["learning_rate"] == other.metrics["learning_rate"]
        assert one.metrics["grad_norm"] == other.metrics["grad_norm"]


def test_random_numbers_go_on_where_they_were(make_trainer, tmp_path):
    trainer = make_trainer()
    torch.rand(3)
    save_state(trainer, tmp_path / "s", {})
    expected = torch.rand(4)
    load_state(trainer, tmp_path / "s")
    assert torch.equal(torch.rand(4), expected)


def test_a_changed_learning_rate_takes_effect_at_resume(make_trainer, make_batch, tmp_path):
    trainer = make_trainer()
    trainer.step(make_batch(0))
    save_state(trainer, tmp_path / "s", {})
    changed = make_trainer(learning_rate=0.5)
    load_state(changed, tmp_path / "s")
    assert changed.step(make_batch(1)).metrics["learning_rate"] == 0.5


def test_the_folder_is_a_model_that_transformers_loads(make_trainer, make_batch, tmp_path):
    trainer = make_trainer()
    trainer.step(make_batch(0))
    save_state(trainer, tmp_path / "s", {})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "s")
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight)
    assert (tmp_path / "s" / "tokenizer_config.json").is_file()


def test_the_configuration_names_the_type_of_the_weights_that_lie_beside_it(make_trainer, model_folder, tmp_path):
    folder = tmp_path / "half"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    half = config | {"dtype": "bfloat16", "torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "n": 1}}
    (folder / "config.json").write_text(json.dumps(half))
    trainer = make_trainer()
    trainer.model_path = folder
    save_state(trainer, tmp_path / "s", {})
    written = json.loads((tmp_path / "s" / "config.json").read_text())
    assert (written["dtype"], written["text_config"]) == ("float32", {"dtype": "float32", "n": 1})
    assert "torch_dtype" not in written
    assert written["hidden_size"] == config["hidden_size"]
    with safe_open(tmp_path / "s" / "model.safetensors", "pt") as file:
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {"torch.float32"}  # noqa: SIM118


def test_a_manifest_lists_every_other_file(make_trainer, tmp_path):
    files = save_state(make_trainer(), tmp_path / "s", {})
    assert files == verify_files(tmp_path / "s")
    names = {path.name for path in (tmp_path / "s").iterdir()}
    assert {file.name for file in files} | {"manifest.json"} == names


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_file_is_named(make_trainer, make_batch, tmp_path, name):
    trainer = make_trainer()
    trainer.step(make_batch(0))
    save_state(trainer, tmp_path / "s", {})
    data = bytearray((tmp_path / "s" / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "s" / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=name):
        load_state(trainer, tmp_path / "s")


def test_no_checkpoint_is_said_so(make_trainer, tmp_path):
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        load_state(make_trainer(), tmp_path / "nowhere")


def test_another_architecture_is_refused(make_trainer, tmp_path):
    save_state(make_trainer(), tmp_path / "s", {})
    path = tmp_path / "s" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architecture": "gpt of 3 weights in 1 tensors"}))
    write_manifest(tmp_path / "s")
    with pytest.raises(CheckpointError, match="holds a gpt"):
        load_state(make_trainer(), tmp_path / "s")


def test_a_full_disk_leaves_the_old_checkpoint(make_trainer, make_batch, tmp_path, monkeypatch):
    trainer = make_trainer()
    save_state(trainer, tmp_path / "s", {"n": 1})
    trainer.step(make_batch(0))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state, "save_file", full)
    with pytest.raises(CheckpointError, match="free space"):
        save_state(trainer, tmp_path / "s", {"n": 2})
    monkeypatch.undo()
    assert load_state(trainer, tmp_path / "s") == {"n": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_what_a_killed_learner_left_half_written_is_removed_at_the_next_save(make_trainer, tmp_path):
    for name in (".s.7.partial", f".s.{os.getpid()}.partial", ".r.7.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    save_state(make_trainer(), tmp_path / "s", {})
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_checkpoint_of_the_same_name_is_replaced(make_trainer, tmp_path):
    trainer = make_trainer()
    save_state(trainer, tmp_path / "s", {"n": 1})
    save_state(trainer, tmp_path / "s", {"n": 2})
    assert load_state(trainer, tmp_path / "s") == {"n": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["s"]

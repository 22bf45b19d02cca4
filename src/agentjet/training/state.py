"""A trainer's whole state as a folder, and back: a resumed step equals the uninterrupted one bit for bit on CPU.

The folder holds the float32 master weights under the names of a Hugging Face checkpoint, beside configuration and
tokenizer, so that it can also be loaded as a model; the optimizer's moments; the random state; `state.json` with
counters and the caller's own state; and, written last, `manifest.json` with the sha256 of every other file.

Invariants: a folder appears whole or not at all; every byte and name is on disk before that; when the disk is full an
older folder is untouched; nothing is unpickled.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentjet.durable.file import sync
from agentjet.durable.manifest import MANIFEST, STATE, verify_files, write_manifest
from agentjet.errors import CheckpointError
from agentjet.schemas.checkpoint import FileDigest
from agentjet.training.trainer import Trainer

WEIGHTS, MOMENTS, RANDOM = "model.safetensors", "optimizer.safetensors", "random.safetensors"
MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""What a model folder holds beside its weights."""
FORMAT = 2


def save_state(trainer: Trainer, folder: Path, extra: Mapping[str, Any]) -> tuple[FileDigest, ...]:
    """Writes the state; a folder of that name is replaced only once the new one is whole.

    Args:
        trainer: Between two steps.
        folder: Where; its parents are made.
        extra: The caller's state: anything JSON.

    Raises:
        CheckpointError: The disk is full or refuses; nothing changed.
    """
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        _remove_leftovers(folder.parent)
        partial.mkdir(parents=True)
        _copy_model_files(trainer.model_path, partial)
        _write_tensors(trainer, partial)
        state = {
            "format": FORMAT,
            "architecture": _architecture(trainer),
            "num_updates": trainer.optimizer.num_updates,
            "num_skipped_in_a_row": trainer.num_skipped_in_a_row,
            "reference": trainer.reference_digest,
            "extra": dict(extra),
        }
        (partial / STATE).write_text(json.dumps(state, sort_keys=True))
        files = write_manifest(partial)
        sync([*partial.iterdir(), partial])
        _take_place(partial, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint {folder} could not be written ({error}); free space on its disk, older ones are intact"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return files


def load_state(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Puts a saved state into a trainer of the same model; returns the caller's own state.

    Raises:
        CheckpointDamagedError: Incomplete or changed since it was written.
        CheckpointError: Unreadable, of another architecture, or trained against another reference.

    After an error the trainer must not be used.
    """
    verify_files(folder)
    try:
        state = json.loads((folder / STATE).read_text())
        weights, moments = load_file(folder / WEIGHTS), load_file(folder / MOMENTS)
        random = load_file(folder / RANDOM)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {folder} can not be read: {error}") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{folder} has format {state.get('format')}, this AgentJet reads {FORMAT}")
    if state["architecture"] != _architecture(trainer):
        raise CheckpointError(f"{folder} holds a {state['architecture']}, the run trains a {_architecture(trainer)}")
    _check_reference(trainer, folder, state["reference"])
    with torch.no_grad():
        for name, weight in trainer.model.named_parameters():
            weight.copy_(weights[name])
    _load_moments(trainer, moments)
    trainer.optimizer.resume(state["num_updates"])
    trainer.num_skipped_in_a_row = state["num_skipped_in_a_row"]
    torch.set_rng_state(random["cpu"])
    if "cuda" in random and torch.cuda.is_available():
        torch.cuda.set_rng_state(random["cuda"])
    return state["extra"]


def _check_reference(trainer: Trainer, folder: Path, saved: str) -> None:
    """A divergence that changes its reference midway would pull to two places; one that starts or ends is a choice."""
    if saved and trainer.reference_digest and saved != trainer.reference_digest:
        raise CheckpointError(
            f"{folder} was trained against a reference with digest {saved[:12]}, but {trainer.model_path} has "
            f"{trainer.reference_digest[:12]}; bring the model's first weights back there, or start a new run"
        )


def _remove_leftovers(parent: Path) -> None:
    """What a learner that was killed while it saved has left: nobody reads it, and it is as large as a checkpoint."""
    for leftover in (*parent.glob(".*.partial"), *parent.glob(".*.old")):
        shutil.rmtree(leftover, ignore_errors=True)


def _copy_model_files(source: Path, target: Path) -> None:
    # The cache's own manifest speaks of the initial weights.
    own = {MANIFEST, STATE, "model.safetensors.index.json", "agentjet-model.json"}
    for path in sorted({path for pattern in MODEL_FILES for path in source.glob(pattern)}):
        if path.name == "config.json":
            config = _in_float32(json.loads(path.read_text("utf-8"))) | {"dtype": "float32"}
            (target / path.name).write_text(json.dumps(config, indent=2), "utf-8")
        elif path.name not in own:
            shutil.copyfile(path, target / path.name)


def _in_float32(config: dict[str, Any]) -> dict[str, Any]:
    """A model's configuration that names the type of the master weights, whatever the model came in."""
    return {
        key: "float32" if key == "dtype" else _in_float32(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "torch_dtype"  # the older name
    }


def _write_tensors(trainer: Trainer, folder: Path) -> None:
    weights = {name: weight.detach().cpu().contiguous() for name, weight in trainer.model.named_parameters()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    save_file(_moments(trainer), folder / MOMENTS)
    random = {"cpu": torch.get_rng_state()}
    if trainer.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state()
    save_file(random, folder / RANDOM)


def _moments(trainer: Trainer) -> dict[str, Tensor]:
    """The optimizer's state by weight name; empty before the first update."""
    optimizer = trainer.optimizer
    return {
        f"{name}.{key}": value.detach().cpu().contiguous()
        for name, weight in zip(optimizer.names, optimizer.weights, strict=True)
        for key, value in optimizer.adam.state[weight].items()
    }


def _load_moments(trainer: Trainer, moments: Mapping[str, Tensor]) -> None:
    optimizer = trainer.optimizer
    for name, weight in zip(optimizer.names, optimizer.weights, strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"{name}.{key}" in moments:
                optimizer.adam.state[weight][key] = moments[f"{name}.{key}"].to(weight.device)


def _architecture(trainer: Trainer) -> str:
    shapes = [tuple(weight.shape) for weight in trainer.model.parameters()]
    return f"{trainer.model.config.model_type} of {sum(map(_size, shapes))} weights in {len(shapes)} tensors"


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _take_place(partial: Path, folder: Path) -> None:
    if folder.exists():
        old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
        folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old)
    else:
        partial.rename(folder)
    sync([folder.parent])

"""A trainer's whole state as a folder, and back: a resumed step equals the uninterrupted one bit for bit on CPU.

The folder holds the float32 master weights under the names of a Hugging Face checkpoint, beside configuration and
tokenizer, so that it can also be loaded as a model; the optimizer's moments; the random state; `state.json` with
counters and the caller's own state; and, written last, `manifest.json` with the sha256 of every other file. Of a model
with an adapter it holds the adapter as peft loads it, and of the base only path and sha256.

Invariants: a folder appears whole or not at all; every byte and name is on disk before that; when the disk is full an
older folder is untouched; nothing is unpickled.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentjet.durable.file import sync
from agentjet.durable.manifest import STATE, verify_files, write_manifest
from agentjet.errors import CheckpointError
from agentjet.pretrained import adapter_file
from agentjet.schemas.checkpoint import FileDigest
from agentjet.training.model_folder import WEIGHTS, copy_model_files
from agentjet.training.snapshot import write_weights
from agentjet.training.trainer import Trainer

MOMENTS, RANDOM = "optimizer.safetensors", "random.safetensors"
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
        _write_weights(trainer, partial)
        save_file(_moments(trainer), partial / MOMENTS)
        save_file(_random(trainer), partial / RANDOM)
        state = {
            "format": FORMAT,
            "architecture": _architecture(trainer),
            "base": _base(trainer),
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
        CheckpointError: Unreadable, of another architecture, adapter or base, or trained against another reference.

    After an error the trainer must not be used.
    """
    verify_files(folder)
    with _reading(folder):
        state = json.loads((folder / STATE).read_text())
    _check(trainer, folder, state)
    with _reading(folder):
        weights, moments = load_file(folder / _weights_name(trainer)), load_file(folder / MOMENTS)
        random = load_file(folder / RANDOM)
    with torch.no_grad():
        for name, weight in trainer.weights.items():
            weight.copy_(weights[name])
    _load_moments(trainer, moments)
    trainer.optimizer.resume(state["num_updates"])
    trainer.num_skipped_in_a_row = state["num_skipped_in_a_row"]
    torch.set_rng_state(random["cpu"])
    if "cuda" in random and torch.cuda.is_available():
        torch.cuda.set_rng_state(random["cuda"])
    return state["extra"]


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {folder} can not be read: {error}") from error


def _check(trainer: Trainer, folder: Path, state: Mapping[str, Any]) -> None:
    """Raises CheckpointError when a state is not one of what is trained."""
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{folder} has format {state.get('format')}, this AgentJet reads {FORMAT}")
    if state["architecture"] != _architecture(trainer):
        raise CheckpointError(f"{folder} holds a {state['architecture']}, the run trains a {_architecture(trainer)}")
    base = state.get("base")
    if base and trainer.adapter and base["digest"] != trainer.adapter.base_digest:
        raise CheckpointError(
            f"{folder} holds an adapter of the model with digest {base['digest'][:12]} (it lay at {base['path']}), but "
            f"{trainer.model_path} has {trainer.adapter.base_digest[:12]}; bring that model back there, or start a new "
            "run"
        )
    _check_reference(trainer, folder, state["reference"])


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


def _write_weights(trainer: Trainer, folder: Path) -> None:
    config = trainer.adapter.config if trainer.adapter else None
    write_weights(trainer.weights, folder / _weights_name(trainer), config)
    if config is None:
        copy_model_files(trainer.model_path, folder)
    else:
        (folder / adapter_file.CONFIG).write_text(json.dumps(config, indent=2), "utf-8")


def _weights_name(trainer: Trainer) -> str:
    return adapter_file.WEIGHTS if trainer.adapter else WEIGHTS


def _base(trainer: Trainer) -> dict[str, str] | None:
    """What an adapter is of."""
    adapter = trainer.adapter
    return {"path": str(adapter.base_path), "digest": adapter.base_digest} if adapter else None


def _random(trainer: Trainer) -> dict[str, Tensor]:
    random = {"cpu": torch.get_rng_state()}
    if trainer.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state()
    return random


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
    weights = trainer.weights.values()
    size = f"of {sum(weight.numel() for weight in weights)} weights in {len(weights)} tensors"
    if not trainer.adapter:
        return f"{trainer.model.config.model_type} {size}"
    config = trainer.adapter.config
    return (
        f"LoRA adapter {size} in a {trainer.model.config.model_type} "
        f"(rank {config['r']}, alpha {config['lora_alpha']:g}, {', '.join(config['target_modules'])})"
    )


def _take_place(partial: Path, folder: Path) -> None:
    if folder.exists():
        old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
        folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old)
    else:
        partial.rename(folder)
    sync([folder.parent])

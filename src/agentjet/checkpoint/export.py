"""A checkpoint as a folder that others load: a model for Transformers and vLLM, or an adapter for peft.

Either lies in the checkpoint as safetensors under the names of its tools already, so exporting is verifying and
copying: float32, without loss. It knows no tensors, so it can not merge an adapter into its model.
"""

import shutil
from pathlib import Path

from agentjet.durable.manifest import STATE, verify
from agentjet.durable.new_folder import new_folder
from agentjet.errors import CheckpointError

WEIGHTS = "model.safetensors"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
_MODEL_SUFFIXES = (".json", ".jinja", ".txt", ".model")


def holds_adapter(checkpoint: Path) -> bool:
    """Whether a checkpoint is that of an adapter."""
    return (checkpoint / ADAPTER_FILES[0]).is_file()


def export(checkpoint: Path, folder: Path) -> Path:
    """Write the model of a checkpoint, or its adapter, to a new folder; returns it.

    Raises CheckpointError when the checkpoint is damaged, lacks a part, or the folder is in use or can not be written.
    """
    # Before gigabytes are read.
    with new_folder(folder) as draft:
        for name in _wanted(checkpoint):
            shutil.copyfile(checkpoint / name, draft / name)
    return folder


def _wanted(checkpoint: Path) -> list[str]:
    names = {file.name for file in verify(checkpoint).files}
    if names >= set(ADAPTER_FILES):
        return list(ADAPTER_FILES)
    if not names >= {WEIGHTS, "config.json"}:
        raise CheckpointError(f"{checkpoint} holds no {WEIGHTS} with a config.json; export an older checkpoint")
    return [name for name in names if name == WEIGHTS or (name.endswith(_MODEL_SUFFIXES) and name != STATE)]

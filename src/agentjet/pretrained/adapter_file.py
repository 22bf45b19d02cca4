"""A LoRA adapter in one safetensors file, and as the folder that peft and vLLM load.

The tensors have peft's names (`base_model.model.<layer>.lora_A.weight` [rank, inputs], `.lora_B.weight`
[outputs, rank]); peft's configuration rides in the file's metadata, so that an adapter travels as one file like whole
weights do.

Invariant: files of equal tensors and configuration have equal bytes, so that a version of an adapter can be a patch of
the one before. It does not know what an adapter is put on.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentjet.errors import EngineError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
"""Before a layer's own name in the names of tensors."""
_KEY = "adapter_config"


def write_adapter(path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write a file with tensors and peft's configuration. OSError when the disk refuses."""
    # One key alone: safetensors writes several in an order that changes from file to file.
    save_file(dict(tensors), path, metadata={_KEY: json.dumps(config, sort_keys=True)})


def read_config(path: Path) -> dict[str, Any]:
    """Peft's configuration in a file. EngineError when there is none, or the file can not be read."""
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise EngineError(f"adapter {path} can not be read: {error}; publish it again") from error
    if _KEY not in metadata:
        raise EngineError(f"{path} holds no adapter; engine and learner need the same `lora` settings of the model")
    return json.loads(metadata[_KEY])


def lay_out(path: Path, folder: Path) -> Path:
    """A new folder with the adapter of a file, as peft and vLLM load it: a hard link, or a copy across disks.

    Raises as `read_config`, and OSError when the folder is there already or the disk refuses.
    """
    config = read_config(path)
    folder.mkdir(parents=True)
    try:
        (folder / WEIGHTS).hardlink_to(path)
    except OSError:
        (folder / WEIGHTS).write_bytes(path.read_bytes())
    (folder / CONFIG).write_text(json.dumps(config, indent=2), "utf-8")
    return folder

"""A checkpoint as a folder that Transformers, vLLM and the hub's tools load.

The master weights lie in it as safetensors under the names of the model's state dict already, so exporting is verifying
and copying: float32, without loss.
"""

import shutil
import tempfile
from pathlib import Path

from agentjet.checkpoint.manifest import verify
from agentjet.errors import CheckpointError

_WEIGHTS = ("model.safetensors", "weights.safetensors")
_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def export(checkpoint: Path, folder: Path) -> Path:
    """Write the model of a checkpoint to a new folder; returns it.

    Raises CheckpointError when the checkpoint is damaged, lacks a part, or the folder is in use or can not be written.
    """
    manifest = verify(checkpoint)
    names = {file.name for file in manifest.files}
    weights = next((name for name in _WEIGHTS if name in names), None)
    if weights is None or "config.json" not in names:
        raise CheckpointError(f"{checkpoint} holds no weights with a config.json; export an older checkpoint")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is there already; choose a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            draft = Path(scratch) / "model"
            draft.mkdir()
            shutil.copyfile(checkpoint / weights, draft / "model.safetensors")
            for name in names.intersection(_MODEL_FILES):
                shutil.copyfile(checkpoint / name, draft / name)
            draft.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} can not be written: {error.strerror}; choose another folder") from error
    return folder

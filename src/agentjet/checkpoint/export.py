"""A checkpoint as a folder that Transformers, vLLM and the hub's tools load.

The master weights lie in it as safetensors under the names of the model's state dict already, so exporting is verifying
and copying: float32, without loss.
"""

import shutil
import tempfile
from pathlib import Path

from agentjet.durable.manifest import STATE, verify
from agentjet.errors import CheckpointError

WEIGHTS = "model.safetensors"
_MODEL_SUFFIXES = (".json", ".jinja", ".txt", ".model")


def export(checkpoint: Path, folder: Path) -> Path:
    """Write the model of a checkpoint to a new folder; returns it.

    Raises CheckpointError when the checkpoint is damaged, lacks a part, or the folder is in use or can not be written.
    """
    # Before gigabytes are read.
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is there already; choose a new folder")
    manifest = verify(checkpoint)
    names = {file.name for file in manifest.files}
    if not {WEIGHTS, "config.json"} <= names:
        raise CheckpointError(f"{checkpoint} holds no {WEIGHTS} with a config.json; export an older checkpoint")
    wanted = [name for name in names if name == WEIGHTS or (name.endswith(_MODEL_SUFFIXES) and name != STATE)]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            draft = Path(scratch) / "model"
            draft.mkdir()
            for name in wanted:
                shutil.copyfile(checkpoint / name, draft / name)
            draft.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} can not be written: {error.strerror}; choose another folder") from error
    return folder

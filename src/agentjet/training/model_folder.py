"""A model's folder as the learner writes it: what lies beside the float32 weights. It knows no tensors."""

import json
import shutil
from pathlib import Path
from typing import Any

from agentjet.durable.manifest import MANIFEST, STATE

WEIGHTS = "model.safetensors"
MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""What lies beside the weights."""
# The cache's own manifest speaks of the initial weights.
_OWN = {MANIFEST, STATE, "model.safetensors.index.json", "agentjet-model.json"}


def copy_model_files(source: Path, target: Path) -> None:
    """Copies what lies beside a model's weights; the configuration then says that these are float32.

    OSError when the disk refuses.
    """
    for path in sorted({path for pattern in MODEL_FILES for path in source.glob(pattern)}):
        if path.name == "config.json":
            config = _in_float32(json.loads(path.read_text("utf-8"))) | {"dtype": "float32"}
            (target / path.name).write_text(json.dumps(config, indent=2), "utf-8")
        elif path.name not in _OWN:
            shutil.copyfile(path, target / path.name)


def _in_float32(config: dict[str, Any]) -> dict[str, Any]:
    """A model's configuration that names the type of the master weights, whatever the model came in."""
    return {
        key: "float32" if key == "dtype" else _in_float32(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "torch_dtype"  # the older name
    }

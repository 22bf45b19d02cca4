"""An adapter's checkpoint as a model of its own, and what that does to the log-probs.

Each weight is `W + alpha / rank * B A`, summed in float64 and rounded once to float32. So in float32 the merged model
is the unmerged one but for rounding. Rounded to bfloat16 it is not: W's rounding takes off what is small beside W,
while an unmerged adapter keeps it. `merging_error` measures both on a fixed text.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from agentjet.durable.manifest import STATE, verify
from agentjet.durable.new_folder import new_folder
from agentjet.errors import CheckpointError
from agentjet.pretrained import adapter_file
from agentjet.training.head import scored_logprobs
from agentjet.training.model import load_model
from agentjet.training.model_folder import WEIGHTS, copy_model_files
from agentjet.training.snapshot import weights_digest, write_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TEXT = """A swarm of agents learns by playing. Each episode ends with a score, from 0 to 1; what was said on the way
there is weighed by it. 17 + 25 = 42, so the answer is 42. def double(x): return 2 * x. "Where is the key?" she asked.
Berlin, Nairobi and Lima lie on three continents; the fourth city, Wellington, lies on none of these."""


@dataclass(frozen=True, slots=True)
class MergingError:
    """How far the log-probs of a text's tokens move when an adapter is merged, in nats."""

    num_tokens: int
    mean: float
    max: float


def base_of(checkpoint: Path) -> Path:
    """The folder of the model that a checkpoint's adapter is of. CheckpointError when the checkpoint is damaged."""
    verify(checkpoint)
    return Path(json.loads((checkpoint / STATE).read_text("utf-8"))["base"]["path"])


def merge(checkpoint: Path, folder: Path, base: Path) -> Path:
    """Writes the model of an adapter's checkpoint to a new folder, in float32; returns it.

    Raises:
        CheckpointError: The checkpoint is damaged, or of another base; or the folder is in use or can not be written.
        ModelNotFoundError: The base is not there.
    """
    with new_folder(folder) as draft:
        verify(checkpoint)
        model = load_model(base)
        weights = dict(model.named_parameters())
        wanted = json.loads((checkpoint / STATE).read_text("utf-8"))["base"]["digest"]
        if (found := weights_digest(weights)) != wanted:
            raise CheckpointError(
                f"{checkpoint} holds an adapter of the model with digest {wanted[:12]}, but {base} has {found[:12]}; "
                "name the folder of that model with --base"
            )
        _add(model, checkpoint)
        write_weights(weights, draft / WEIGHTS, None)
        copy_model_files(base, draft)
    return folder


def merging_error(checkpoint: Path, base: Path, merged: Path) -> dict[str, MergingError]:
    """By the type that everything is held in, as an engine of that type holds it: weights, adapter, merged weights."""
    ids = _ids(base)
    return {name: _error(checkpoint, base, merged, ids, dtype) for name, dtype in DTYPES.items()}


def as_json(errors: dict[str, MergingError]) -> dict[str, dict[str, float]]:
    """The figures by type and name."""
    return {name: asdict(error) for name, error in errors.items()}


@torch.no_grad()
def _add(model: PreTrainedModel, checkpoint: Path) -> None:
    """Merges an adapter into a float32 model where it lies."""
    config = json.loads((checkpoint / adapter_file.CONFIG).read_text("utf-8"))
    tensors = load_file(checkpoint / adapter_file.WEIGHTS)
    for name, first in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        layer = name.removesuffix(".lora_A.weight")
        weight = model.get_parameter(f"{layer.removeprefix(adapter_file.PREFIX)}.weight")
        second = tensors[f"{layer}.lora_B.weight"]
        weight.copy_(weight.double() + config["lora_alpha"] / config["r"] * (second.double() @ first.double()))


def _error(checkpoint: Path, base: Path, merged: Path, ids: Tensor, dtype: torch.dtype) -> MergingError:
    unmerged = PeftModel.from_pretrained(_plain(base, dtype), str(checkpoint), autocast_adapter_dtype=False)
    before = _logprobs(unmerged.get_base_model(), ids)  # type: ignore[arg-type]
    del unmerged
    gap = (_logprobs(_plain(merged, dtype), ids) - before).abs()
    return MergingError(len(gap), float(gap.mean()), float(gap.max()))


def _plain(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


@torch.no_grad()
def _logprobs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """[tokens - 1] of every token after the first; the output head computes in float32."""
    hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
    rows = torch.arange(len(hidden))
    found, _ = scored_logprobs(
        hidden,
        model.get_output_embeddings().weight,  # type: ignore[union-attr, arg-type]
        torch.ones(len(hidden)),
        rows,
        ids[1:],
        softcap=getattr(model.config, "final_logit_softcapping", None),
    )
    return found


def _ids(folder: Path) -> Tensor:
    """The text's token ids; its bytes where the model has no tokenizer."""
    if (folder / "tokenizer.json").is_file():
        return torch.tensor(AutoTokenizer.from_pretrained(folder, local_files_only=True)(TEXT)["input_ids"])
    config = json.loads((folder / "config.json").read_text("utf-8"))
    return torch.tensor(list(TEXT.encode())) % config["vocab_size"]

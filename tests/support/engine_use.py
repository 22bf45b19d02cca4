"""Asking an engine, and what one plain forward pass says of its answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentjet.inference.engine import Draw, Engine, Generation
from agentjet.schemas.sampling import Sampling

TOLERANCE = 1e-3


def ask(id: str, prompt: Sequence[int], *, stop_ids: frozenset[int] = frozenset(), **sampling: Any) -> Generation:
    return Generation(id, prompt, Sampling(**({"max_tokens": 12, "seed": 1} | sampling)), stop_ids)


async def collect(engine: Engine, generation: Generation) -> list[Draw]:
    return [draw async for draw in engine.generate(generation)]


def ids_of(draws: Sequence[Draw]) -> list[int]:
    return [token for draw in draws for token in draw.ids]


def logprobs_of(draws: Sequence[Draw]) -> torch.Tensor:
    return torch.tensor([logprob for draw in draws for logprob in draw.logprobs])


def reference(path: Path, prompt: Sequence[int], drawn: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of drawn ids by one plain forward pass."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *drawn]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(drawn)[:, None])[:, 0]


def assert_exact(path: Path, prompt: Sequence[int], draws: Sequence[Draw], temperature: float = 1.0) -> None:
    expected = reference(path, prompt, ids_of(draws), temperature)
    assert (logprobs_of(draws) - expected).abs().max().item() <= TOLERANCE


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 400, length).tolist()


def scale_embeddings(source: Path, target: Path, factor: float) -> None:
    weights = load_file(source)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * np.float32(factor)
    save_file(weights, target, metadata={"format": "pt"})


def learner_differences(
    folder: Path, prompts: Sequence[Sequence[int]], results: Sequence[Sequence[Draw]], temperature: float
) -> torch.Tensor:
    """How far an engine's log-probs are from those of a learner that computes in bfloat16 under autocast."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    differences = []
    for ids, draws in zip(prompts, results, strict=True):
        drawn = ids_of(draws)
        with torch.no_grad():
            with torch.autocast("cpu", torch.bfloat16):
                hidden = model.model(torch.tensor([[*ids, *drawn]])).last_hidden_state[0, len(ids) - 1 : -1]
            logits = model.lm_head(hidden.float()) / temperature
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(drawn)[:, None])[:, 0]
        differences.append((logprobs_of(draws) - expected).abs())
    return torch.cat(differences)


def city_prompts(folder: Path, number: int) -> list[list[int]]:
    """Short questions in SmolLM2's chat form."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [
        tokenizer.encode(f"<|im_start|>user\nName {n} cities.<|im_end|>\n<|im_start|>assistant\n")
        for n in range(number)
    ]


def broken_snapshots(base: Path, folder: Path, *, is_tied: bool = False) -> dict[str, Path]:
    """Files that are no weights of a model of 64 hidden units, by words of the refusal."""
    good = load_file(base / "model.safetensors")
    norm = "model.norm.weight"
    broken: dict[str, dict[str, Any]] = {
        "missing": {name: value for name, value in good.items() if name != norm},
        "unknown": good | {"model.extra": np.ones(3, np.float32)},
        "has floating": good | {norm: np.ones(63, np.float32)},
        "I64": good | {norm: np.ones(64, np.int64)},
    }
    if is_tied:
        broken["differs"] = good | {"lm_head.weight": good["model.embed_tokens.weight"] + 1}
    paths = {}
    for index, (words, weights) in enumerate(broken.items()):
        paths[words] = folder / f"{index}.safetensors"
        save_file(weights, paths[words])
    paths["can not be read"] = folder / "garbage.safetensors"
    paths["can not be read"].write_bytes(b"no safetensors")
    return paths

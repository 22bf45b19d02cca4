"""The tree's gradients and log-probs against the same rows computed one by one by an unpatched model."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_sample import sample_of_rows
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from agentjet.config import LoraSettings
from agentjet.errors import UnsupportedArchitectureError
from agentjet.training import attention, attention_plan, depth_first
from agentjet.training.adapter import Adapter
from agentjet.training.attention import IMPLEMENTATION
from agentjet.training.depth_first import backward_forest
from agentjet.training.model import check_architecture
from agentjet.training.tree_forward import tree_input

torch.set_num_threads(1)
VOCAB = 61
Row = tuple[list[int], list[int], float]
"""Prompt, completion, temperature."""
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
CONFIGS: dict[str, Callable[[], object]] = {
    "llama": lambda: LlamaConfig(**BASE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**BASE),
    "mistral": lambda: MistralConfig(**BASE, sliding_window=None),
    "mistral_window": lambda: MistralConfig(**BASE, sliding_window=7),
    "gemma2": lambda: Gemma2Config(
        **BASE, sliding_window=6, query_pre_attn_scalar=16, attn_logit_softcapping=3.0, final_logit_softcapping=2.0
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **BASE, sliding_window=6, query_pre_attn_scalar=16, layer_types=["sliding_attention", "full_attention"]
    ),
    "smollm3": lambda: SmolLM3Config(**BASE, no_rope_layers=[1, 0]),
    "qwen2_window": lambda: Qwen2Config(**BASE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
}


def tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def chain(rng: random.Random) -> list[list[Row]]:
    history, rows = tokens(rng, 9), []
    for _ in range(4):
        completion = tokens(rng, 4)
        rows.append((list(history), completion, 0.7))
        history += completion + tokens(rng, 3)
    return [rows]


def think_drop(rng: random.Random) -> list[list[Row]]:
    history, rows = tokens(rng, 9), []
    for _ in range(4):
        thought, answer = tokens(rng, 6), tokens(rng, 3)
        rows.append((list(history), thought + answer, 1.0))
        history += answer + tokens(rng, 2)
    return [rows]


def group_of_chains(rng: random.Random) -> list[list[Row]]:
    prompt = tokens(rng, 20)
    found = []
    for temperature in (1.0, 0.6, 1.0, 1.3):
        history, rows = list(prompt), []
        for _ in range(3):
            completion = [rng.randrange(3), 5]
            rows.append((list(history), completion, temperature))
            history += [*completion, 7, rng.randrange(2)]
        found.append(rows)
    return found


def random_trees(rng: random.Random) -> list[list[Row]]:
    found = []
    for _ in range(5):
        rows: list[Row] = []
        for _ in range(4):
            old = rng.choice(rows) if rows and rng.random() < 0.7 else ([rng.randrange(2)], [], 1.0)
            whole = old[0] + old[1]
            prompt = whole[: rng.randrange(1, len(whole) + 1)] + tokens(rng, rng.randrange(4))
            rows.append((prompt, tokens(rng, rng.randrange(1, 30)), rng.choice([0.5, 1.0])))
        found.append(rows)
    return found


def group(rng: random.Random) -> list[list[Row]]:
    prompt = tokens(rng, 23)
    return [[(prompt, [rng.randrange(2), *tokens(rng, rng.randrange(1, 6))], 1.0)] for _ in range(6)]


def binary_trees(rng: random.Random) -> list[list[Row]]:
    """Every node is an answer of its own, so inner tokens carry one term for each time they were sampled."""
    found = []
    for _ in range(2):
        paths = [tokens(rng, 3)]
        rows: list[Row] = []
        for _ in range(3):
            grown = [path + tokens(rng, rng.randrange(1, 5)) for path in paths for _ in range(2)]
            rows += [(path[:3], path[3:], 1.0) for path in grown]
            paths = grown
        found.append(rows)
    return found


SHAPES = {
    "chain": chain,
    "think_drop": think_drop,
    "group": group,
    "group_of_chains": group_of_chains,
    "random": random_trees,
    "binary": binary_trees,
}


def make_model(name: str, implementation: str, dtype: torch.dtype, targets: tuple[str, ...] = ()) -> PreTrainedModel:
    """With targets: one whose adapter alone has a gradient, and is no longer a fresh one."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=implementation)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.25)
    if targets:
        lora = LoraSettings(rank=3, alpha=6.0, target_modules=targets)
        adapter = Adapter(model, lora, base=Path("base"), dtype=torch.float32, seed=0)
        for weight in adapter.weights.values():
            torch.nn.init.normal_(weight, std=0.2)
    return model.to(dtype).eval()


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' RMSNorm computes in float32 inside a float64 model; keep the model's own type."""

    def norm(self, hidden):
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def shifted_norm(self, hidden):
        return (1 + self.weight) * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)

    for name in ("Llama", "Qwen2", "Qwen3", "Mistral", "SmolLM3", "Gemma2", "Gemma3"):
        place = f"transformers.models.{name.lower()}.modeling_{name.lower()}.{name}RMSNorm.forward"
        monkeypatch.setattr(place, shifted_norm if name.startswith("Gemma") else norm)


def row_attention(module, query, key, value, mask, *, scaling, sliding_window=None, softcap=None, **_):
    """Plain attention of one row, in the model's own type; Transformers' eager softmax is float32."""
    key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], 1) for states in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    gap = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])[None]
    hidden = (gap < 0) | (gap >= (sliding_window or len(gap)))
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(1, 2), None


AttentionInterface.register("test_row", row_attention)


def row_results(model: PreTrainedModel, episodes: list[list[Row]], weights: torch.Tensor) -> tuple[torch.Tensor, list]:
    """Every call as a row of its own through the model's usual forward pass."""
    logprobs = []
    for prompt, completion, temperature in (row for rows in episodes for row in rows):
        ids = torch.tensor([prompt + completion])
        mask = torch.ones_like(ids)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0, len(prompt) - 1 : -1]
        wide = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
        logprobs.append(wide.gather(1, torch.tensor(completion)[:, None])[:, 0])
    found = torch.cat(logprobs)
    (found * weights).sum().backward()
    return found.detach(), gradients(model)


def gradients(model: PreTrainedModel) -> list[torch.Tensor]:
    """Of all that is trained."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad]


def tree_results(
    model: PreTrainedModel, episodes: list[list[Row]], weights: torch.Tensor, stretch: int = 10**9
) -> tuple[torch.Tensor, list]:
    _, tree = tree_input(
        [
            sample_of_rows([row[:2] for row in rows], calls=[{"temperature": row[2]} for row in rows])
            for rows in episodes
        ],
        stretch_tokens=lambda forest: stretch,
    )
    seen: list[torch.Tensor] = []

    def objective(logprob, entropy):
        seen.append(logprob.detach())
        return (logprob * weights).sum()

    backward_forest(model, tree, objective)
    return seen[0], gradients(model)


def distance(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """Relative difference of two gradients."""
    difference = sum((a - b).double().pow(2).sum() for a, b in zip(left, right, strict=True))
    return float((difference / sum(b.double().pow(2).sum() for b in right)).sqrt())


def compare(
    name: str, shape: str, dtype: torch.dtype, stretch: int = 10**9, targets: tuple[str, ...] = ()
) -> tuple[float, float]:
    episodes = SHAPES[shape](random.Random(shape))
    num_terms = sum(len(row[1]) for rows in episodes for row in rows)
    weights = torch.randn(num_terms, generator=torch.Generator().manual_seed(5)).to(dtype)
    plain = "test_row" if name.startswith("gemma") else "sdpa"
    rows, row_grads = row_results(make_model(name, plain, dtype, targets), episodes, weights)
    tree, tree_grads = tree_results(make_model(name, IMPLEMENTATION, dtype, targets), episodes, weights, stretch)
    return float((tree - rows).abs().max()), distance(tree_grads, row_grads)


CUTS = {
    "cheapest": {"RUN_COST": 40, "GRID_TOKENS": 4},
    "dense": {"RUN_COST": 10**9, "RUN_TOKENS": 10**9},
    "segments": {"RUN_COST": 0, "KEY_COST": 0, "GRID_TOKENS": 10**9},
    "blocks": {"RUN_COST": 0, "RUN_TOKENS": 5, "GRID_TOKENS": 5},
    "pairs": {"RUN_COST": 0, "RUN_TOKENS": 2, "GRID_TOKENS": 1},
}
"""Constants of the plan that make the cut what its name says."""


@pytest.fixture(params=CUTS)
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in CUTS[request.param].items():
        monkeypatch.setattr(attention_plan, name, value)
    return request.param


@pytest.mark.usefixtures("exact_norms", "cut")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_is_that_of_unmerged_rows(name, shape):
    logprob, gradient = compare(name, shape, torch.float64)
    assert logprob <= 1e-12
    assert gradient <= 1e-12


@pytest.mark.usefixtures("exact_norms", "cut")
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_that_are_computed_again_give_the_same_gradient(shape, monkeypatch):
    monkeypatch.setattr(attention, "KEPT_PER_TOKEN", 0)
    assert compare("mistral_window", shape, torch.float64)[1] <= 1e-12


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "stretch"), [*((name, 17) for name in CONFIGS), ("mistral_window", 3)])
def test_a_walk_through_the_forest_gives_the_same_gradient(name, shape, stretch):
    logprob, gradient = compare(name, shape, torch.float64, stretch)
    assert logprob <= 1e-12
    assert gradient <= 1e-12


LINEAR = LoraSettings().target_modules


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("stretch", [10**9, 17])
@pytest.mark.parametrize("shape", ["group_of_chains", "binary"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_of_an_adapter_is_that_of_unmerged_rows(name, shape, stretch):
    logprob, gradient = compare(name, shape, torch.float64, stretch, LINEAR)
    assert logprob <= 1e-12
    assert gradient <= 1e-12


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("stretch", [10**9, 3])
@pytest.mark.parametrize("target", LINEAR)
def test_an_adapter_on_one_kind_of_layer_gets_its_whole_gradient(target, stretch):
    """Then some layers' queries, keys or values need no gradient and others do."""
    assert compare("llama", "random", torch.float64, stretch, (target,))[1] <= 1e-12


@pytest.mark.parametrize("shape", SHAPES)
def test_the_float32_gradient_is_that_of_unmerged_rows(shape):
    assert compare("llama", shape, torch.float32)[1] <= 5e-6


PATHS = [("cheapest", 10**9), ("dense", 10**9), ("segments", 10**9), ("blocks", 10**9), ("cheapest", 17)]
"""Cut, and tokens of a stretch."""


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize(("cut", "stretch"), PATHS, indirect=["cut"])
def test_a_dropped_mask_is_noticed(cut, stretch, monkeypatch):
    whole = attention_plan.AttentionPlan.mask
    monkeypatch.setattr(attention_plan.AttentionPlan, "mask", lambda plan, *args: torch.zeros_like(whole(plan, *args)))
    assert compare("llama", "group", torch.float64, stretch)[1] > 1e-2


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize(("cut", "stretch"), PATHS, indirect=["cut"])
def test_packed_positions_are_noticed(cut, stretch, monkeypatch):
    whole = tree_input

    def packed(samples, **options):
        forest, tree = whole(samples, **options)
        return forest, replace(tree, depths=torch.arange(len(tree.depths)))

    monkeypatch.setitem(globals(), "tree_input", packed)
    assert compare("llama", "group", torch.float64, stretch)[1] > 1e-3


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize(("cut", "stretch"), PATHS, indirect=["cut"])
def test_a_window_in_places_instead_of_depth_is_noticed(cut, stretch, monkeypatch):
    whole = attention_plan.depth_gap

    def places(forest, ends, queries, keys):
        return np.where(whole(forest, ends, queries, keys) >= 0, queries[:, None] - keys[None], -1)

    monkeypatch.setattr(attention_plan, "depth_gap", places)
    assert compare("mistral_window", "group", torch.float64, stretch)[1] > 1e-3


@pytest.mark.usefixtures("exact_norms")
def test_gradients_that_a_later_stretch_left_are_needed(monkeypatch):
    monkeypatch.setattr(
        depth_first.KeyStore, "gradients", lambda store, layer: [torch.zeros_like(s) for s in store._states[layer]]
    )
    assert compare("llama", "group", torch.float64, 17)[1] > 1e-3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(**BASE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "dynamic"),
        (LlamaConfig(**BASE, attention_dropout=0.1), "attention_dropout"),
        (GPT2Config(), "gpt2"),
        (GptOssConfig(), "gpt_oss"),
        (Gemma3TextConfig(**BASE, use_bidirectional_attention=True), "bidirectional"),
        (
            Gemma3TextConfig(
                **BASE,
                rope_parameters={
                    "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            ),
            "dynamic",
        ),
    ],
)
def test_what_can_not_be_exact_is_refused_by_name(config, message):
    with pytest.raises(UnsupportedArchitectureError, match=message):
        check_architecture(config)

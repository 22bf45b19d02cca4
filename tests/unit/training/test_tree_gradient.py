"""The tree's gradients and log-probs against the same rows computed one by one by an unpatched model."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from agentjet.errors import UnsupportedArchitectureError
from agentjet.merging import TokenTrie
from agentjet.schemas.ids import GroupId, RunId
from agentjet.schemas.sample import MergeReport, Sample, SampledCall
from agentjet.training import attention
from agentjet.training.attention import IMPLEMENTATION
from agentjet.training.model import check_architecture
from agentjet.training.tree_forward import tree_input, tree_logprobs

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
    "qwen2_window": lambda: Qwen2Config(**BASE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
}


def make_sample(rows: Sequence[Row]) -> Sample:
    trie = TokenTrie()
    for prompt, completion, _ in rows:
        trie.insert([*prompt, *completion])
    places = [place for prompt, completion, _ in rows for place in trie.places([*prompt, *completion])[len(prompt) :]]
    return Sample(
        run=RunId("run-abcdef"),
        model="m",
        ticket="p-0.0.0",
        group=GroupId("p-0"),
        member=0,
        rank=0,
        group_size=1,
        reward=0.0,
        segments=trie.segments(),
        calls=tuple(
            SampledCall(call=str(i), num_terms=len(row[1]), temperature=row[2], versions=("1-0",))
            for i, row in enumerate(rows)
        ),
        term_segment=tuple(segment for segment, _ in places),
        term_offset=tuple(offset for _, offset in places),
        term_logprob=tuple(0.0 for _ in places),
        report=MergeReport(num_calls=1, num_branches=1, num_row_tokens=0, num_tree_tokens=0),
    )


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


def group(rng: random.Random) -> list[list[Row]]:
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


SHAPES = {"chain": chain, "think_drop": think_drop, "group": group, "random": random_trees}


def make_model(name: str, implementation: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=implementation)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.25)
    return model.to(dtype).eval()


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' RMSNorm computes in float32 inside a float64 model; keep the model's own type."""

    def norm(self, hidden):
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    for name in ("llama.modeling_llama.Llama", "qwen3.modeling_qwen3.Qwen3", "mistral.modeling_mistral.Mistral"):
        monkeypatch.setattr(f"transformers.models.{name}RMSNorm.forward", norm)
    monkeypatch.setattr("transformers.models.qwen2.modeling_qwen2.Qwen2RMSNorm.forward", norm)


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
    return found.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def tree_results(model: PreTrainedModel, episodes: list[list[Row]], weights: torch.Tensor) -> tuple[torch.Tensor, list]:
    _, tree = tree_input([make_sample(rows) for rows in episodes])
    found, _ = tree_logprobs(model, tree)
    (found * weights).sum().backward()
    return found.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def distance(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """Relative difference of two gradients."""
    difference = sum((a - b).double().pow(2).sum() for a, b in zip(left, right, strict=True))
    return float((difference / sum(b.double().pow(2).sum() for b in right)).sqrt())


def compare(name: str, shape: str, dtype: torch.dtype) -> tuple[float, float]:
    episodes = SHAPES[shape](random.Random(shape))
    num_terms = sum(len(row[1]) for rows in episodes for row in rows)
    weights = torch.randn(num_terms, generator=torch.Generator().manual_seed(5)).to(dtype)
    rows, row_grads = row_results(make_model(name, "sdpa", dtype), episodes, weights)
    tree, tree_grads = tree_results(make_model(name, IMPLEMENTATION, dtype), episodes, weights)
    return float((tree - rows).abs().max()), distance(tree_grads, row_grads)


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_is_that_of_unmerged_rows(name, shape, monkeypatch):
    monkeypatch.setattr(attention, "RUN_LENGTHS", (8, 16))
    logprob, gradient = compare(name, shape, torch.float64)
    assert logprob <= 1e-12
    assert gradient <= 1e-12


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_fused_kernel_gives_the_same_gradient(shape, monkeypatch):
    monkeypatch.setattr(attention, "EXPLICIT_ELEMENTS", 0)
    monkeypatch.setattr(attention, "RUN_LENGTHS", (8, 16))
    assert compare("mistral_window", shape, torch.float64)[1] <= 1e-12


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("lengths", [(), (1,), (3,), (64,)])
def test_the_cut_of_the_forest_changes_nothing(lengths, monkeypatch):
    monkeypatch.setattr(attention, "RUN_LENGTHS", lengths)
    assert compare("llama", "random", torch.float64)[1] <= 1e-12


@pytest.mark.parametrize("shape", SHAPES)
def test_the_float32_gradient_is_that_of_unmerged_rows(shape):
    assert compare("llama", shape, torch.float32)[1] <= 5e-6


def test_a_dropped_mask_is_noticed(monkeypatch):
    whole = attention.AttentionPlan.mask
    monkeypatch.setattr(attention.AttentionPlan, "mask", lambda plan, *args: torch.zeros_like(whole(plan, *args)))
    assert compare("llama", "group", torch.float64)[1] > 1e-2


def test_packed_positions_are_noticed(monkeypatch):
    whole = tree_input

    def packed(samples):
        forest, tree = whole(samples)
        return forest, replace(tree, depths=torch.arange(len(tree.depths)))

    monkeypatch.setitem(globals(), "tree_input", packed)
    assert compare("llama", "group", torch.float64)[1] > 1e-3


def test_a_window_in_places_instead_of_depth_is_noticed(monkeypatch):
    whole = attention._depth_gap

    def places(forest, queries, keys, is_real):
        gap = queries[:, :, None] - keys[:, None]
        import numpy as np

        return np.where(whole(forest, queries, keys, is_real) >= 0, gap, -1).astype(np.int32)

    monkeypatch.setattr(attention, "_depth_gap", places)
    assert compare("mistral_window", "group", torch.float64)[1] > 1e-3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(**BASE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "dynamic"),
        (LlamaConfig(**BASE, attention_dropout=0.1), "attention_dropout"),
    ],
)
def test_what_can_not_be_exact_is_refused_by_name(config, message):
    with pytest.raises(UnsupportedArchitectureError, match=message):
        check_architecture(config)

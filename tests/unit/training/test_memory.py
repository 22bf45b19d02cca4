"""The estimate of activations against what autograd really keeps, and the stretches that follow from it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, Qwen3Config

from agentjet.merging import Forest
from agentjet.merging.flop import ModelShape
from agentjet.schemas.sample import Segment
from agentjet.training.attention import IMPLEMENTATION
from agentjet.training.attention_plan import plan_attention
from agentjet.training.memory import FILLED_RATIO, MIN_TOKENS, WALKED_RATIO, MemoryBudget

NUM_TOKENS = 300
BASE = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen3": Qwen3Config, "gemma2": Gemma2Config}


def chain(num_tokens: int) -> Forest:
    ids = np.arange(num_tokens) % 61
    nothing = np.empty(0, np.int64)
    segment = Segment(parent=-1, ids=tuple(ids.tolist()))
    return Forest((segment,), np.zeros(1, np.int64), ids, np.arange(num_tokens), nothing, nothing, nothing)


def kept_bytes(model: torch.nn.Module, forest: Forest, dtype: torch.dtype) -> int:
    """Bytes of the distinct tensors that the forward pass keeps, those of the weights left out."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    shapes = {shape for weight in model.parameters() for shape in (tuple(weight.shape), tuple(weight.shape[::-1]))}
    found: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights and tuple(tensor.shape) not in shapes:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids, depths = torch.from_numpy(forest.ids)[None], torch.from_numpy(forest.depths)[None]
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16),
    ):
        model.base_model(input_ids=ids, position_ids=depths, use_cache=False, tree_plan=plan_attention(forest))
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 160}, {"intermediate_size": 480}, {"num_attention_heads": 8}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_estimate_holds_what_autograd_keeps_and_not_much_more(name, dtype, sizes):
    config = CONFIGS[name](**(BASE | sizes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION).float().eval()
    forest = chain(NUM_TOKENS)
    estimate = MemoryBudget(ModelShape.of(config), dtype, 0).activation_bytes(forest) * NUM_TOKENS
    assert kept_bytes(model, forest, dtype) <= estimate <= 2.2 * kept_bytes(model, forest, dtype)


SHAPE = ModelShape.of(LlamaConfig(**BASE))
WHOLE = int(MemoryBudget(SHAPE, torch.bfloat16, 0).activation_bytes(chain(1000)) * 1000)


def test_a_forest_that_fits_is_computed_at_once():
    assert MemoryBudget(SHAPE, torch.bfloat16, int(WHOLE / FILLED_RATIO) + 2).stretch_tokens(chain(1000)) == 1000


def test_a_larger_one_shares_the_budget_with_its_carried_keys():
    budget = MemoryBudget(SHAPE, torch.bfloat16, WHOLE // 2)
    length = budget.stretch_tokens(chain(1000))
    used = length * budget.activation_bytes(chain(1000)) + 1000 * budget.carried_bytes
    assert MIN_TOKENS < length < 500
    assert used <= WALKED_RATIO * budget.num_bytes < used + budget.activation_bytes(chain(1000))


def test_a_budget_without_room_still_goes_on():
    assert MemoryBudget(SHAPE, torch.bfloat16, 1).stretch_tokens(chain(1000)) == MIN_TOKENS


def test_kept_attention_weights_are_counted_up_to_their_limit():
    budget = MemoryBudget(replace(SHAPE, num_heads=64), torch.bfloat16, 0)
    short, long, longest = (budget.activation_bytes(chain(length)) for length in (100, 1000, 2000))
    assert short < long == longest

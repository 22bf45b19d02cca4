"""The fused kernel's mask and outputs against the runs; its gradient where there is a GPU."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from agentjet.training.attention import tree_attention
from agentjet.training.attention_plan import depth_gap
from agentjet.training.flex import ancestor_mask, block_mask, compiled_kernel, flex_tree_attention
from agentjet.training.tree_forward import tree_input

HEADS, KV_HEADS, SIZE = 4, 2, 16


@pytest.fixture
def plan(make_batch):
    return tree_input([sample for group in make_batch(3) for sample in group])[1].plan


@pytest.mark.parametrize("window", [None, 3])
def test_the_mask_is_that_of_the_runs(plan, window):
    places = torch.arange(plan.num_tokens)
    zero = torch.zeros((), dtype=torch.long)
    found = ancestor_mask(plan, window)(zero, zero, places[:, None], places[None])
    gap = torch.from_numpy(depth_gap(plan.forest, plan.ends, places.numpy(), places.numpy()))
    assert torch.equal(found, (gap >= 0) & (gap < (window or plan.num_tokens)))


def test_layers_share_a_block_mask(plan):
    assert block_mask(plan, None) is block_mask(plan, 0)
    assert block_mask(plan, 3) is not block_mask(plan, None)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 3])
def test_the_outputs_are_those_of_the_runs(plan, window, softcap):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, plan.num_tokens, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    with torch.no_grad():
        wanted, _ = tree_attention(
            torch.nn.Module(),
            query,
            key,
            value,
            None,
            tree_plan=plan,
            scaling=0.3,
            sliding_window=window,
            softcap=softcap,
        )
        found = flex_tree_attention(flex_attention, query, key, value, plan, scale=0.3, window=window, softcap=softcap)
    torch.testing.assert_close(found.transpose(1, 2), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused kernel's backward pass needs a CUDA device")
@pytest.mark.parametrize("window", [None, 3])
def test_the_gradient_on_a_gpu_is_that_of_the_runs(make_batch, window):
    samples = [sample for group in make_batch(3) for sample in group]
    results = []
    for device in ("cpu", "cuda"):
        plan = tree_input(samples, device)[1].plan
        torch.manual_seed(0)
        states = [torch.randn(1, heads, plan.num_tokens, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        states = [one.to(device).requires_grad_() for one in states]
        if device == "cpu":
            out, _ = tree_attention(
                torch.nn.Module(), *states, None, tree_plan=plan, scaling=0.3, sliding_window=window
            )
        else:
            out = flex_tree_attention(compiled_kernel(), *states, plan, scale=0.3, window=window, softcap=None)
            out = out.transpose(1, 2)
        (out * torch.arange(SIZE, device=device)).sum().backward()
        results.append([one.grad.cpu() for one in states])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

"""A walk through a forest against the same forest in one graph: losses that couple terms, entropy, bf16, bits."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from agentjet.training.attention import IMPLEMENTATION
from agentjet.training.depth_first import backward_forest, forest_logprobs
from agentjet.training.tree_forward import tree_input, tree_logprobs

STRETCH = 13


@pytest.fixture
def model():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION).eval()


@pytest.fixture
def trees(make_batch):
    """The same forest, to be computed at once and to be walked."""
    samples = [sample for group in make_batch(1) for sample in group]
    return [tree_input(samples, stretch_tokens=lambda forest, n=n: n)[1] for n in (10**6, STRETCH)]


def coupled(logprob, entropy):
    """The product of all terms and a bonus: no term's gradient is known before all terms are."""
    return logprob.mean().exp() * 10 - 0.3 * (entropy * logprob.detach()).mean()


def gradient(model, tree, objective=coupled, **options):
    model.zero_grad()
    loss = backward_forest(model, tree, objective, **options)
    return loss, torch.cat([weight.grad.flatten() for weight in model.parameters()])


def distance(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_losses_that_couple_terms_have_the_gradient_of_one_graph(model, trees, entropy_grad):
    whole, walked = (gradient(model, tree, entropy_grad=entropy_grad) for tree in trees)
    assert walked[0].item() == pytest.approx(whole[0].item(), rel=1e-5)
    assert distance(walked[1], whole[1]) <= 5e-6


def test_the_entropy_has_a_gradient_only_where_it_is_asked_for(model, trees):
    with_entropy, without = (gradient(model, trees[1], entropy_grad=flag)[1] for flag in (True, False))
    assert distance(with_entropy, without) > 1e-2


def test_weights_that_autocast_keeps_have_gradients_after_the_first_pass(model, trees):
    found = []
    for tree in trees:
        with torch.autocast("cpu", torch.bfloat16):
            found.append(gradient(model, tree, head_dtype=torch.bfloat16)[1])
    assert distance(found[1], found[0]) <= 2e-2


def test_log_probs_without_a_gradient_are_those_of_one_graph(model, trees):
    whole, walked = (forest_logprobs(model, tree) for tree in trees)
    for one, other, graph in zip(walked, whole, tree_logprobs(model, trees[0]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert torch.equal(other, graph.detach())
        assert not one.requires_grad


def test_a_walk_gives_the_same_bits_again(model, trees):
    first, second = (gradient(model, trees[1])[1] for _ in range(2))
    assert torch.equal(first, second)


def test_no_pass_computes_more_than_a_stretch(model, trees, monkeypatch):
    lengths = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, options: lengths.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    gradient(model, trees[1])
    assert max(lengths) <= STRETCH
    assert sum(lengths) == 2 * len(trees[1].ids)

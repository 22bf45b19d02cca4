"""The head's log-probs, entropies and gradients against a plain log-softmax, and the memory they take."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from agentjet.training.head import scored_logprobs

ROWS, TARGETS = torch.tensor([0, 0, 1, 3, 3, 3, 7]), torch.tensor([1, 2, 3, 4, 4, 5, 6])


def plain(hidden, weight, temperature, softcap):
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits / temperature[:, None]).log_softmax(-1)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("block", [0, 7 * 4, 1000])
def test_values_and_gradients_are_those_of_a_plain_log_softmax(monkeypatch, softcap, entropy_grad, block):
    monkeypatch.setattr("agentjet.training.head.CHUNK_ELEMENTS", 7 * 3)
    monkeypatch.setattr("agentjet.training.head.BLOCK_ELEMENTS", block)
    torch.manual_seed(0)
    hidden = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    temperature = torch.rand(8, dtype=torch.float64) + 0.5
    found, entropy = scored_logprobs(
        hidden, weight, temperature, ROWS, TARGETS, softcap=softcap, entropy_grad=entropy_grad
    )
    wanted = plain(hidden, weight, temperature, softcap)
    wanted_entropy = -(wanted.exp() * wanted).sum(-1)
    torch.testing.assert_close(found, wanted[ROWS, TARGETS], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=1e-12, atol=1e-12)
    assert entropy.requires_grad == entropy_grad
    scale, bonus = torch.randn(7, dtype=torch.float64), torch.randn(8, dtype=torch.float64) * entropy_grad
    ours = torch.autograd.grad((found * scale).sum() + (entropy * bonus).sum(), (hidden, weight))
    theirs = torch.autograd.grad(
        (wanted[ROWS, TARGETS] * scale).sum() + (wanted_entropy * bonus).sum(), (hidden, weight)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gap", [4.0, 6.0, 8.0, 10.0])
def test_an_almost_certain_token_keeps_its_gradient_in_bfloat16(gap):
    """Its own entry is 1 - p: a probability that was rounded to 8 bits would leave nothing of it."""
    hidden = torch.tensor([[gap, 0.0], [gap, 1.0]])
    rows, targets = torch.tensor([0, 0, 1]), torch.tensor([0, 0, 0])
    gradients = []
    for grad_dtype in (torch.float32, torch.bfloat16):
        leaf = hidden.clone().requires_grad_()
        found, _ = scored_logprobs(leaf, torch.eye(2), torch.ones(2), rows, targets, grad_dtype=grad_dtype)
        (found * torch.tensor([2.0, -0.5, 1.0])).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=2**-7, atol=0.0)


def test_a_frozen_head_gets_no_gradient_and_hands_one_on():
    hidden, weight = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3)
    rows = torch.tensor([0, 1])
    scored_logprobs(hidden, weight, torch.ones(2), rows, rows)[0].sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


class _Largest(TorchDispatchMode):
    """The most elements of any tensor that is made, but those of the weight's own shape."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.ignored, self.num_elements = {tuple(weight.shape), tuple(weight.T.shape)}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) not in self.ignored:
                self.num_elements = max(self.num_elements, tensor.numel())
        return out


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("vocab", [1000, 8000])
def test_no_tensor_grows_with_rows_times_vocabulary(monkeypatch, vocab, entropy_grad):
    limit, num_rows = 16_000, 200
    monkeypatch.setattr("agentjet.training.head.CHUNK_ELEMENTS", limit)
    monkeypatch.setattr("agentjet.training.head.BLOCK_ELEMENTS", limit)
    hidden = torch.randn(num_rows, 8, requires_grad=True)
    weight = torch.randn(vocab, 8, requires_grad=True)
    rows = torch.arange(num_rows)
    with _Largest(weight) as largest:
        logprob, entropy = scored_logprobs(hidden, weight, torch.ones(num_rows), rows, rows, entropy_grad=entropy_grad)
        (logprob.sum() + entropy.sum()).backward()
    assert largest.num_elements == limit

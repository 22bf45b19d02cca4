import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from agentjet.inference.adapted_linear import AdapterBank
from agentjet.inference.adapter_layout import AdapterLayout, Factors
from agentjet.inference.packed_linear import PackedLinear, pack_linears

RANK, SIZES = 2, {"one": (6, 5), "two": (4, 6)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, (outputs, inputs) in SIZES.items():
            layer = nn.Linear(inputs, outputs)
            layer.weight.data = torch.randn(outputs, inputs, generator=generator)
            layer.bias.data = torch.randn(outputs, generator=generator)
            setattr(self, name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


def factors(seed: int) -> dict[str, Factors]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"model.{name}": Factors(
            torch.randn(RANK, inputs, generator=generator), torch.randn(outputs, RANK, generator=generator)
        )
        for name, (outputs, inputs) in SIZES.items()
    }


def bank_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> AdapterBank:
    pack_linears(model, dtype)
    return AdapterBank(
        model, "model.", AdapterLayout(RANK, 3.0, {f"model.{name}": size for name, size in SIZES.items()})
    )


def merged(adapter: int) -> Model:
    """The model with an adapter multiplied into its weights."""
    model = Model()
    for name, one in factors(adapter).items() if adapter else ():
        model.get_submodule(name.removeprefix("model.")).weight.data += 1.5 * one.up @ one.down
    return model


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=8), st.integers(0, 3))
def test_each_token_of_a_step_gets_its_own_adapter_and_no_other(adapters: list[tuple[int, int]], padding: int):
    model = Model()
    bank = bank_of(model)
    for adapter in (1, 2, 3):
        bank.put(adapter, bank.convert(factors(adapter)))
    length = sum(count for _, count in adapters)
    x = torch.randn(1, length + padding, 5, generator=torch.Generator().manual_seed(1))
    bank.assign(adapters)
    with torch.no_grad():
        out = model(x)
        start = 0
        for adapter, count in adapters:
            own = slice(start, start + count)
            torch.testing.assert_close(out[:, own], merged(adapter)(x[:, own]), atol=1e-4, rtol=1e-4)
            start += count


def test_neighbours_of_one_adapter_are_one_product():
    bank = bank_of(Model())
    bank.assign([(1, 2), (1, 3), (0, 1), (2, 1), (1, 4)])
    assert [(span.tokens.start, span.tokens.stop, span.adapter) for span in bank._spans] == [
        (0, 5, 1),
        (6, 7, 2),
        (7, 11, 1),
    ]


def test_the_factors_are_rounded_to_the_type_that_the_layer_multiplies_in():
    model = Model()
    bank = bank_of(model, torch.bfloat16)
    bank.put(1, bank.convert(factors(1)))
    bank.assign([(1, 3)])
    x = torch.randn(1, 3, 5).bfloat16()
    with torch.no_grad():
        out, base = model.one(x), PackedLinear(Model().one.weight, Model().one.bias, torch.bfloat16)(x)
        one = factors(1)["model.one"]
        added = 1.5 * (x.float() @ one.down.bfloat16().float().T @ one.up.bfloat16().float().T)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, base + added, check_dtype=False, atol=0.0, rtol=2**-8)


def test_an_adapter_that_was_dropped_leaves_nothing_behind():
    bank = bank_of(Model())
    bank.put(1, bank.convert(factors(1)))
    bank.drop(1)
    assert all(not layer.factors for layer in bank._layers.values())
    with pytest.raises(KeyError):
        bank.drop(1)

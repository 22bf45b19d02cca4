"""Linear layers with low-rank adapters beside them, several at once in one step.

Invariants:

- The base product is computed once for all tokens, unmerged; an adapter's product on its own tokens only.
- The factors are rounded to the type that the layer multiplies in, as the learner rounds them. On a CPU they are
  multiplied in float32 all the same: for so few columns that is ten times as fast as in bfloat16, and exacter.

It does not know versions or requests: adapters are numbers, 0 is the layer alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from agentjet.inference.adapter_layout import AdapterLayout, Factors
from agentjet.inference.packed_linear import PackedLinear


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of a step's flat row that have one adapter."""

    tokens: slice
    adapter: int


class AdaptedLinear(nn.Module):
    """A layer, and what adapters add to it.

    Args:
        base: The layer alone.
        scaling: Factor of each low-rank product.
        spans: Those of the step, shared by all layers.
    """

    def __init__(self, base: PackedLinear, scaling: float, spans: Sequence[Span]) -> None:
        super().__init__()
        self.base, self.factors = base, dict[int, Factors]()
        """Those of each adapter, transposed."""
        self._scaling, self._spans = scaling, spans

    def forward(self, x: Tensor) -> Tensor:
        """Input [1, tokens, in], output [1, tokens, out] in the base's type."""
        x = x.to(self.base.dtype)
        out = self.base(x)
        for span in self._spans:
            factors = self.factors[span.adapter]
            product = x[0, span.tokens].to(factors.down.dtype) @ factors.down @ factors.up
            out[0, span.tokens].add_(product, alpha=self._scaling)
        return out


class AdapterBank:
    """The adapters of one model's layers.

    Args:
        model: Its layers are replaced; those that are adapted must be `PackedLinear`.
        prefix: Of the model's layers in the layout.
        layout: Which are adapted.
    """

    def __init__(self, model: nn.Module, prefix: str, layout: AdapterLayout) -> None:
        self.layout = layout
        self._spans: list[Span] = []
        self._layers: dict[str, AdaptedLinear] = {}
        for name in layout.layers:
            parent, _, leaf = name.removeprefix(prefix).rpartition(".")
            base = model.get_submodule(parent).get_submodule(leaf)
            assert isinstance(base, PackedLinear), f"{name} is packed before it is adapted"
            self._layers[name] = AdaptedLinear(base, layout.scaling, self._spans)
            setattr(model.get_submodule(parent), leaf, self._layers[name])

    def convert(self, factors: Mapping[str, Factors]) -> dict[str, Factors]:
        """Factors as the layers multiply them: transposed, in rows that lie together."""
        return {
            name: Factors(_like(one.down, self._layers[name].base), _like(one.up, self._layers[name].base))
            for name, one in factors.items()
        }

    def put(self, adapter: int, factors: Mapping[str, Factors]) -> None:
        """Adds an adapter; its factors come from `convert`."""
        for name, one in factors.items():
            self._layers[name].factors[adapter] = one

    def drop(self, adapter: int) -> None:
        """Removes an adapter."""
        for layer in self._layers.values():
            del layer.factors[adapter]

    def assign(self, adapters: Sequence[tuple[int, int]]) -> None:
        """What the next step's tokens get: adapters in the order of the flat row, each with its number of tokens."""
        self._spans.clear()
        start = 0
        for adapter, length in adapters:
            last = self._spans[-1] if self._spans else None
            if last is not None and (last.adapter, last.tokens.stop) == (adapter, start):
                self._spans[-1] = Span(slice(last.tokens.start, start + length), adapter)
            elif adapter:
                self._spans.append(Span(slice(start, start + length), adapter))
            start += length


def _like(factor: Tensor, base: PackedLinear) -> Tensor:
    device = base.packed.device
    rounded = factor.to(device=device, dtype=base.dtype).T.contiguous()
    return rounded.float() if device.type == "cpu" else rounded

"""Linear layers whose weights lie in memory as the CPU's matrix kernels want them.

`torch.nn.functional.linear` reorders its weight at every call; for the few rows of a decoding step that costs as much
as the product itself (measured: 1.4 to 1.8 times in bfloat16, 2 to 3 times in float32, where it also avoids a slower
library on AMD processors). On other devices, and on CPUs whose kernels lack the dtype, these layers are plain ones.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether reordered weights work for this device and dtype."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` without gradient, computed in `dtype` as autocast would.

    `weight` is handed over once and not kept in its plain form.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.is_packed = can_pack(weight.device, dtype)
        self.packed = self.pack(weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(dtype), requires_grad=False)

    def pack(self, weight: Tensor) -> Tensor:
        """The weight [out, in] in the form that `packed` takes."""
        weight = weight.detach().to(self.dtype)
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self.is_packed else weight

    def forward(self, x: Tensor) -> Tensor:
        """Input [..., in], output [..., out] in `dtype`."""
        x = x.to(self.dtype)
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return functional.linear(x, self.packed, self.bias)


def pack_linears(module: nn.Module, dtype: torch.dtype) -> dict[str, PackedLinear]:
    """Replaces every `nn.Linear` below a module; returns the new layers by the names of the old."""
    packed = {}
    for name, linear in list(module.named_modules()):
        if isinstance(linear, nn.Linear):
            parent, _, leaf = name.rpartition(".")
            packed[name] = PackedLinear(linear.weight, linear.bias, dtype)
            setattr(module.get_submodule(parent), leaf, packed[name])
    return packed

"""Which numbers the learner computes in.

Invariants: master weights and log-probs are float32; `auto` is a function of the machine's instruction set alone.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

DTYPES = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float32": torch.float32}


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of a setting; `auto` takes bfloat16 where the device multiplies it in hardware."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    is_fast = device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if is_fast else torch.float32


def autocast(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Matrix products in `dtype`; its cast weights are kept until the context ends."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)

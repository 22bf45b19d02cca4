"""The processes that share a learner's work.

Invariant: every rank holds the whole batch and computes its packs of one and the same sum, so ranks only add up and all
of them end with the same weights.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

T = TypeVar("T")


class Ranks:
    """This process among those of its learner."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Those of the items that this rank computes."""
        return items[self._accelerator.process_index :: self._accelerator.num_processes]

    def gather(self, own: T) -> list[T]:
        """What every rank holds, by rank."""
        return [own] if self._accelerator.num_processes == 1 else gather_object([own])

    def add_gradients(self, weights: Iterable[nn.Parameter]) -> None:
        """Replaces each gradient by the sum over the ranks."""
        if self._accelerator.num_processes == 1:
            return
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad = self._accelerator.reduce(weight.grad, reduction="sum")  # type: ignore[assignment]

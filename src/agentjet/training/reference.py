"""The policy that a run began with, frozen: what a divergence is measured against.

It comes from the model's own path, never from a checkpoint, so a resumed run and a replay measure against the same.

Invariants: its layers' matrices lie in the type that the learner multiplies in, everything else is float32; a policy
with the same weights therefore gets the same log-probs, bit for bit, and a divergence of exactly 0.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from agentjet.training.model import load_model
from agentjet.training.snapshot import weights_digest


class Reference:
    """A frozen model.

    Args:
        path: Folder of the model.
        device: Where it computes.
        dtype: Type of the matrix products.
        home: Where its weights lie in between.
    """

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype, home: torch.device) -> None:
        self._device, self._home = device, home
        model = load_model(path)
        self.digest = weights_digest(model)
        """sha256 over its weights in float32."""
        self._model: PreTrainedModel = _frozen(model, dtype)
        self._move(home)

    @contextmanager
    def present(self) -> Iterator[PreTrainedModel]:
        """The model on its device, inside the block."""
        self._move(self._device)
        try:
            yield self._model
        finally:
            self._move(self._home)

    def _move(self, device: torch.device) -> None:
        torch.nn.Module.to(self._model, device)


def _frozen(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    head = model.get_output_embeddings()
    for module in model.modules():
        # The head's weight may be the embedding's, and its product is float32.
        if isinstance(module, nn.Linear) and module is not head:
            module.weight.data = module.weight.data.to(dtype)
    model.requires_grad_(False)
    return model

"""The policy that a run began with, frozen: what a divergence is measured against.

It comes from the model's own path, never from a checkpoint, so a resumed run and a replay measure against the same.
Where an adapter is trained it is the same model with the adapter switched off; else it is a second one.

Invariant: a policy with the same weights gets the same log-probs, bit for bit, and a divergence of exactly 0
(`agentjet.training.model.freeze`).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from agentjet.training.adapter import Adapter
from agentjet.training.model import freeze, load_model
from agentjet.training.snapshot import weights_digest


class Reference(Protocol):
    """A policy that is not trained."""

    @property
    def digest(self) -> str:
        """sha256 over its weights in float32."""
        ...

    def present(self) -> AbstractContextManager[PreTrainedModel]:
        """The model on its device, inside the block."""
        ...


class FrozenCopy:
    """A model of its own.

    Args:
        path: Folder of the model.
        device: Where it computes.
        dtype: Type of the matrix products.
        home: Where its weights lie in between.
    """

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype, home: torch.device) -> None:
        self._device, self._home = device, home
        self._model = load_model(path)
        self._digest = weights_digest(dict(self._model.named_parameters()))
        freeze(self._model, dtype)
        self._move(home)

    @property
    def digest(self) -> str:
        """sha256 over its weights in float32."""
        return self._digest

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


class AdapterOff:
    """The model that is trained, without its adapter."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    @property
    def digest(self) -> str:
        """sha256 over the base's weights in float32."""
        return self._adapter.base_digest

    @contextmanager
    def present(self) -> Iterator[PreTrainedModel]:
        """The model, without its adapter inside the block."""
        with self._adapter.off():
            yield self._adapter.model

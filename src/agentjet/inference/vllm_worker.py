"""What AgentJet adds to vLLM's workers: new weights from a snapshot that every worker can read.

Invariants:

- Each worker takes its own part of every tensor out of the whole snapshot, so tensor-parallel shards need nothing else.
- A snapshot that can not be opened, or is not the one that was announced, is refused before a weight is touched. What
  fails later leaves the worker half-loaded, and raises: the engine has to end.

This module is imported in vLLM's own processes, by its name in the engine's arguments.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from agentjet.errors import EngineError
from agentjet.inference.weight_file import Snapshot


class SnapshotLoader:
    """Mixed into vLLM's worker class; its public methods are called on every worker at once."""

    def load_snapshot(self, path: str, names: Sequence[str]) -> str:
        """Puts the named tensors of a safetensors file in place; other workers do the same with their parts.

        Returns:
            Why nothing was touched; empty when the weights are in place.
        """
        worker: Any = self
        with ExitStack() as stack:
            try:
                snapshot = stack.enter_context(Snapshot(Path(path)))
            except EngineError as error:
                return str(error)
            missing = [name for name in names if name not in snapshot]
            if missing:
                return f"weights {path} lack {len(missing)} tensors {missing[:3]}"
            worker.reload_weights(weights_iterator=snapshot.tensors(names))
        return ""

"""What AgentJet adds to vLLM's workers: new weights from a snapshot that every worker can read.

Invariants:

- Each worker takes its own part of every tensor out of the whole snapshot, so tensor-parallel shards need nothing else.
- A snapshot that can not be opened, or is not the one that was announced, is refused before a weight is touched. What
  fails later leaves the worker half-loaded, and raises: the engine has to end.
- No tensor of the model keeps its old value without a word, as vLLM would let it.

This module is imported in vLLM's own processes, by its name in the engine's arguments.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from agentjet.errors import EngineError
from agentjet.inference.vllm_change import WeightChanger
from agentjet.inference.weight_file import Snapshot


class SnapshotLoader(WeightChanger):
    """Mixed into vLLM's worker class; its public methods are called on every worker at once."""

    def load_snapshot(self, path: str, names: Sequence[str]) -> str:
        """Puts the named tensors of a safetensors file in place; other workers do the same with their parts.

        Returns:
            Why nothing was touched; empty when the weights are in place.

        Raises:
            EngineError: Not all of the model's tensors got a value.
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
            model = worker.get_model()
            with _recorded(model) as loaded:
                worker.reload_weights(weights_iterator=snapshot.tensors(names))
        left = sorted(name for name, _ in model.named_parameters() if name not in loaded)
        # A quantized model has tensors that no snapshot holds.
        if left and worker.model_config.quantization is None:
            raise EngineError(
                f"vLLM's {type(model).__name__} took nothing out of weights {path} for {len(left)} of its tensors "
                f"{left[:3]}: this version of vLLM can not be given new weights of this model"
            )
        return ""


@contextmanager
def _recorded(model: Any) -> Iterator[set[str]]:
    """The names of the tensors that a vLLM model says to have loaded, inside the block."""
    loaded: set[str] = set()
    load = model.load_weights

    def record(weights: Any) -> Any:
        names = load(weights)
        loaded.update(names or ())
        return names

    model.load_weights = record
    try:
        yield loaded
    finally:
        del model.load_weights

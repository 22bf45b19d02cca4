"""vLLM's worker on a CPU whose linear layers keep their weights as they were loaded, as on a GPU.

It is named as the worker's extension, and imported in vLLM's process before the model is loaded.
"""

import torch
from vllm.model_executor.layers import utils

from agentjet.inference.vllm_worker import SnapshotLoader


def keep_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


utils.dispatch_cpu_unquantized_gemm = keep_plain


class PlainLoader(SnapshotLoader):
    """Tells how often it loaded a whole snapshot."""

    num_loads = 0

    def load_snapshot(self, path, names) -> str:
        type(self).num_loads += 1
        return super().load_snapshot(path, names)

    def count_loads(self) -> int:
        return self.num_loads

"""What packs cost: unmerged, at least, and as they are computed. Sums of operations, never time.

`tree / executed` is the share of the bound that the plan reaches: what is missing are hidden pairs inside a run of the
attention, and the second forward pass over a forest that is walked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agentjet.merging import Forest
from agentjet.merging.flop import PASSES, ModelShape, Workload, forest_workload, step_flops, unmerged_workload
from agentjet.schemas.sample import Sample
from agentjet.training.tree_forward import TreeInput


@dataclass(slots=True)
class Cost:
    """Operations of forward and backward passes."""

    rows: float = 0.0
    """Each call as a row of its own."""
    tree: float = 0.0
    """Each unique token once, with the exact pairs."""
    executed: float = 0.0
    """As planned."""

    def add(self, other: "Cost") -> None:
        """Takes in the cost of further packs."""
        self.rows += other.rows
        self.tree += other.tree
        self.executed += other.executed

    def figures(self) -> dict[str, float]:
        """Ratios; empty where nothing was computed."""
        if not self.executed:
            return {}
        return {"flop_ratio": self.rows / self.tree, "bound_share": self.tree / self.executed}


def pack_cost(shape: ModelShape, samples: Sequence[Sample], forest: Forest, tree: TreeInput) -> Cost:
    """The cost of one pack; forest and tree are those of its samples."""
    num_rows = len(tree.row_position)
    planned = Workload(
        forest.num_tokens, num_rows, {window: tree.plan.num_pairs(window) for window in dict.fromkeys(shape.windows)}
    )
    num_passes = PASSES if tree.is_whole else PASSES + 1
    return Cost(
        rows=float(step_flops(shape, unmerged_workload(shape, samples, forest)).total),
        tree=float(step_flops(shape, forest_workload(shape, forest, num_rows)).total),
        executed=step_flops(shape, planned).total * num_passes / PASSES,
    )

"""The ledger's record of an issued group, for tests: a training group of two unless told otherwise."""

from typing import Any

from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import GroupIssue
from agentjet.schemas.task import EpisodeKind


def group_issue(run: RunId, index: int = 0, *, models: tuple[str, ...] = ("m",), **fields: Any) -> GroupIssue:
    """Issue number `index`, which is also its position and, in training, its rank for each model."""
    is_training = fields.get("kind", EpisodeKind.TRAIN) is EpisodeKind.TRAIN
    usual = {
        "run": run,
        "pool": "p",
        "index": index,
        "kind": EpisodeKind.TRAIN,
        "position": index,
        "size": 2,
        "seed": 1,
        "models": models,
        "ranks": dict.fromkeys(models, index) if is_training else {},
        "deadline_seconds": 60.0,
        "max_offers": 1,
    }
    return GroupIssue(**(usual | fields))

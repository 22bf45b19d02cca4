"""Checkpoints on disk and in CHECKPOINTS: verify, name, prune, export. Knows no tensors."""

from agentjet.checkpoint.keeper import CheckpointKeeper
from agentjet.checkpoint.store import CheckpointStore

__all__ = ["CheckpointKeeper", "CheckpointStore"]

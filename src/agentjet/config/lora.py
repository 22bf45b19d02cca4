"""A low-rank adapter in place of all weights (LoRA, arXiv:2106.09685)."""

from typing import Annotated

from pydantic import Field

from agentjet.config.section import Natural, Positive, Section

_LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraSettings(Section):
    """What of a model is trained: with a rank, `W + alpha / rank * B A` of the target layers, and W stays as it was."""

    rank: Natural = 0
    """Columns of B and rows of A; 0 trains all weights."""
    alpha: Positive = 32.0
    """The update is scaled by `alpha / rank`."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = _LINEAR_LAYERS
    """Last parts of the names of the linear layers that get an adapter."""
    num_versions: Annotated[int, Field(ge=2)] = 4
    """Adapters that an engine holds at once: the newest, and those with which running calls began. Where there are as
    many, a new one waits."""

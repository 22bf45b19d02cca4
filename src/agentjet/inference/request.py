"""One generation on its way through the engine."""

from dataclasses import dataclass, field
from random import Random

import numpy as np

from agentjet.inference.adapter_shelf import Adapter
from agentjet.inference.engine import Generation
from agentjet.inference.stop_string import StopWatcher


@dataclass(slots=True, eq=False)
class Request:
    """State of one generation; the engine's thread owns it."""

    generation: Generation
    max_new: int
    """Tokens to draw at most: `max_tokens`, clamped to the context."""
    random: Random
    """This request's own source of draws; the same seed gives the same numbers in any company."""
    stop: StopWatcher | None
    ids: list[int] = field(default_factory=list)
    """Prompt and drawn ids."""
    row: int = -1
    """Cache row while running."""
    num_computed: int = 0
    """Ids whose keys and values are in the row."""
    num_cached: int = -1
    """Prompt tokens found in the cache at first admission; -1 before."""
    adapter: Adapter | None = None
    """What it keeps to its end; None where all requests have the same weights."""
    weights: int = 0
    """Names the weights that its keys and values are of; only requests with the same share them."""
    is_mixed: bool = False
    """Some of its keys and values are of older weights than those that draw its next token."""

    def __post_init__(self) -> None:
        self.ids = list(self.generation.prompt_ids)

    @property
    def num_left(self) -> int:
        """Ids not yet computed; the next token can be drawn when a step computes the last of them."""
        return len(self.ids) - self.num_computed

    @property
    def num_drawn(self) -> int:
        """Drawn ids."""
        return len(self.ids) - len(self.generation.prompt_ids)

    def array(self) -> np.ndarray:
        """All ids."""
        return np.asarray(self.ids, np.int64)

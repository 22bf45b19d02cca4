"""How tokens are drawn."""

from typing import Annotated

from pydantic import Field

from agentjet.schemas.field import AsTuple
from agentjet.schemas.record import Part


class Sampling(Part):
    """Sampling parameters of one call.

    Log-probs are always those of the distribution at `temperature` over the whole vocabulary, so on training calls
    `top_p` is 1 and `top_k` is 0, and `temperature` is above 0.
    """

    temperature: Annotated[float, Field(ge=0.0, le=10.0)] = 1.0
    """0 takes the most likely token (evaluation only)."""
    max_tokens: Annotated[int, Field(ge=1)] = 1024
    """Most tokens to draw; clamped to what the context leaves."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus share; 1 keeps the whole vocabulary."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Most likely tokens kept; 0 keeps all."""
    stop: Annotated[tuple[str, ...], AsTuple] = ()
    """Strings that end the reply and are left out of its text; all sampled ids are kept."""
    seed: int | None = None
    """Seed of this call's draws; None takes fresh entropy."""

"""What the inference actor knows of an engine: token ids in, token ids and log-probs out.

Invariants:

- Ids are exactly as sampled; each log-prob is that of its token at the sampling temperature over the whole vocabulary,
  computed in float32. (Under top-p or top-k it may be that among the tokens kept; such calls are not trained.)
- No cached key or value survives a change of weights: running requests recompute theirs, and each token carries the
  version that drew it. (Under `keep_kv` running requests keep theirs, and what they draw from then on is marked.)
- An engine of LoRA adapters holds several versions at once: a generation keeps the one that was newest when it began.
- `update_weights` is ordered: no token is drawn while weights are put in place; when it raises or times out the engine
  goes on with the old version, or has ended. An engine is never left paused.

It does not know text beyond stop strings, episodes, or the bus.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from agentjet.schemas.call import FinishReason
from agentjet.schemas.ids import Version
from agentjet.schemas.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Generation:
    """A question to an engine."""

    id: str
    """Unique; names the request for `cancel`."""
    prompt_ids: Sequence[int]
    sampling: Sampling
    stop_ids: frozenset[int]
    """Tokens that end the reply (every end-of-turn id of the generation config)."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Tokens drawn since the last one; the last draw of a generation has a finish reason."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Float32, one for each id."""
    version: Version
    """Weights that drew all of these ids."""
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    """The stop string that ended it, if one did."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were at hand."""
    is_mixed: bool = False
    """Drawn with keys and values of older weights at hand (`keep_kv`): no one version gives these log-probs."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is."""

    num_running: int
    num_waiting: int
    num_cached_tokens: int
    tokens_per_second: float
    """Drawn tokens over the last seconds of work."""


class Engine(Protocol):
    """Generates for one model with continuous batching."""

    @property
    def version(self) -> Version:
        """Weights that a generation which begins now is drawn with."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and completion together."""
        ...

    @property
    def load(self) -> EngineLoad: ...

    async def start(self) -> None:
        """Load the model; errors are `ModelNotFoundError`, `UnsupportedArchitectureError`, `EngineError`."""
        ...

    def generate(self, generation: Generation) -> AsyncIterator[Draw]:
        """Draws as they come.

        Raises ContextLengthError when the prompt leaves no room, EngineEndedError when the engine can serve no more,
        EngineError when it fails at this generation. Closing the iterator cancels the generation.
        """
        ...

    async def update_weights(self, version: Version, path: Path, *, timeout_seconds: float = 120.0) -> None:
        """Serve a safetensors file as `version`.

        It is a full snapshot (names as in the model's state dict) or, where the engine has `lora` settings, an adapter
        (`pretrained.adapter_file`); for that a place may have to be waited for. Raises EngineError or TimeoutError, and
        then the engine goes on with the old weights.
        """
        ...

    async def ended(self) -> NoReturn:
        """Raises EngineEndedError once the engine can serve no more, by `close` or by a defect."""
        ...

    async def close(self) -> None: ...


class Tokenizer(Protocol):
    """The part of a Transformers tokenizer that is used here."""

    @property
    def chat_template(self) -> str | None: ...
    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...
    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any: ...

"""What an agent is handed beside its task: an OpenAI-compatible endpoint and a notebook.

Light on purpose: it is imported by worker processes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from agentjet.errors import AbortError


def _discard(message: dict[str, Any]) -> None:
    """Nobody reads the transcript."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The models that an episode plays with.

    Example:
        >>> client = AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key)
        >>> await client.chat.completions.create(model=policy.model, messages=messages, **policy.sampling)
    """

    base_url: str
    """Of the OpenAI API, `/v1` included."""
    api_key: str
    """Of this episode only: calls made with it are this episode's."""
    models: tuple[str, ...]
    """Names to ask for, in the order of the pool's settings."""
    seed: int = 0
    """The same for all members of a group: use it for what the environment draws."""
    ticket: str = ""
    """Id of the episode."""
    is_eval: bool = False
    """The episode is an evaluation and trains nothing."""
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    """The pool's sampling, as keyword arguments of `chat.completions.create`."""
    on_log: Callable[[dict[str, Any]], None] = _discard

    @property
    def model(self) -> str:
        """The first (often the only) model."""
        return self.models[0]

    def log(self, message: dict[str, Any]) -> None:
        """Adds a line to the episode's transcript, for people to read; it is never trained on.

        By custom a chat message: `{"role": "assistant", "content": "4"}`. Any values that msgpack knows will do.
        """
        self.on_log(dict(message))

    def abort(self, why: str) -> NoReturn:
        """Gives the episode up: it is offered again and gets no score."""
        raise AbortError(why)

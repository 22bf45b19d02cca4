"""What a gateway knows of one key: which calls it answered, and what its episode has to hear of."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from agentjet.schemas.ids import CallId


@dataclass(slots=True)
class Session:
    """The requests of one key so far."""

    calls: dict[str, list[CallId]] = field(default_factory=lambda: defaultdict(list))
    """Answered calls for each model, in the order of their answers: what an episode's end lists."""
    stop_reason: str = ""
    """`schemas.episode.CONTEXT` once a prompt left no room for a token."""
    overridden: list[str] = field(default_factory=list[str])
    """Sampling fields that did not take effect because they break the ratio."""
    num_told: int = 0
    """How many of them a response has named."""
    num_requests: int = 0
    idempotent: dict[str, list[CallId]] = field(default_factory=dict[str, list[CallId]])
    """Calls by the request's idempotency key."""
    undelivered: dict[str, list[CallId]] = field(default_factory=dict[str, list[CallId]])
    """Calls by the digest of a request whose caller went away before its answer."""

    def answered(self, model: str, call: CallId) -> None:
        """A call's reply goes to the agent; a repeated one counts once."""
        if call not in self.calls[model]:
            self.calls[model].append(call)

    def override(self, names: Iterable[str]) -> None:
        """Notes fields that did not take effect."""
        self.overridden += [name for name in dict.fromkeys(names) if name not in self.overridden]

    def news(self) -> list[str]:
        """Overridden fields that the episode has not heard of; each comes out once."""
        fresh = self.overridden[self.num_told :]
        self.num_told = len(self.overridden)
        return fresh

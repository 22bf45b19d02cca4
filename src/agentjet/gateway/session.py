"""What a gateway knows of one key: which calls it answered, and what its episode has to hear of."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agentjet.gateway.fault import ApiError
from agentjet.schemas.ids import CallId


@dataclass(slots=True)
class Session:
    """The requests of one key so far."""

    calls: dict[str, list[CallId]] = field(default_factory=lambda: defaultdict(list))
    """Answered calls for each model, in the order of their answers: what an episode's end lists."""
    stop_reason: str = ""
    """`schemas.episode.CONTEXT` once a prompt left no room for a token."""
    overridden: list[str] = field(default_factory=list[str])
    """Fields that did not take effect, most of them because they break the ratio."""
    num_told: int = 0
    """How many of them a response has named."""
    num_requests: int = 0
    holders: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    """The engine that answered last, and so holds the cache, for each model and agent."""
    choosing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a request's calls are chosen."""
    idempotent: dict[str, tuple[str, list[CallId]]] = field(default_factory=dict[str, tuple[str, list[CallId]]])
    """Digest and calls of a request by its idempotency key."""
    undelivered: dict[str, list[CallId]] = field(default_factory=dict[str, list[CallId]])
    """Calls by the digest of a request whose caller went away before its answer."""

    def answered(self, model: str, call: CallId) -> None:
        """A call's reply goes to the agent; a repeated one counts once."""
        if call not in self.calls[model]:
            self.calls[model].append(call)

    def calls_of(self, idempotency_key: str, digest: str) -> Sequence[CallId]:
        """Calls of the request that had this idempotency key; ApiError (422) when that was another request."""
        before, calls = self.idempotent.get(idempotency_key, (digest, ()))
        if before != digest:
            why = "this Idempotency-Key was sent with another request; each request needs a key of its own"
            raise ApiError(422, "idempotency_key_reused", why, param="Idempotency-Key")
        return calls

    def override(self, names: Iterable[str]) -> None:
        """Notes fields that did not take effect."""
        self.overridden += [name for name in dict.fromkeys(names) if name not in self.overridden]

    def news(self) -> list[str]:
        """Overridden fields that the episode has not heard of; each comes out once."""
        fresh = self.overridden[self.num_told :]
        self.num_told = len(self.overridden)
        return fresh

"""What an API dialect is to the gateway: a body in, a body or server-sent events out.

Invariants:

- A dialect is pure: it knows no bus, no session and no HTTP connection.
- It drops nothing silently: each field of a body is honoured, known to be harmless, or refused by name.
- The events of a stream are a function of the deltas and replies; whoever calls has joined what was lost on the way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from agentjet.gateway.fault import ApiError
from agentjet.gateway.request import ModelRequest
from agentjet.schemas.call import InferDelta, InferReply

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One server-sent event."""

    data: Body | str
    """An object, or a bare word such as `[DONE]`."""
    name: str = ""
    """The event's type; some dialects write none."""

    def encode(self) -> bytes:
        """The event as it goes over the connection."""
        data = self.data.encode() if isinstance(self.data, str) else orjson.dumps(self.data)
        name = f"event: {self.name}\n".encode() if self.name else b""
        return b"%bdata: %b\n\n" % (name, data)


class StreamWriter(Protocol):
    """Writes the events of one streamed response.

    The order of calls: `start`; for each choice `delta` any number of times, then `end`; `finish`. `fail` ends a stream
    at any place.
    """

    def start(self) -> Iterable[ServerEvent]:
        """Before the first token."""
        ...

    def delta(self, index: int, delta: InferDelta) -> Iterable[ServerEvent]:
        """A piece of choice `index`; one without anything in it may come."""
        ...

    def end(self, index: int, reply: InferReply) -> Iterable[ServerEvent]:
        """All of choice `index` was written; its reply has the finish reason and the usage."""
        ...

    def finish(self, replies: Sequence[InferReply]) -> Iterable[ServerEvent]:
        """All choices ended."""
        ...

    def fail(self, error: ApiError) -> Iterable[ServerEvent]:
        """The stream ends in an error."""
        ...


class Dialect(Protocol):
    """One API as its client packages speak it."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Where it is served (POST)."""
        ...

    def parse(self, body: Any, *, is_strict: bool) -> ModelRequest:
        """The request in a decoded JSON body.

        With `is_strict` fields that break the ratio of training are refused. ApiError (400) that names the field.
        """
        ...

    def answer(self, request: Any, replies: Sequence[InferReply]) -> Body:
        """The whole response; one reply for each choice. `request` is what `parse` returned."""
        ...

    def writer(self, request: Any, response_id: str) -> StreamWriter:
        """Of a streamed response; `response_id` is unique."""
        ...

    def error(self, error: ApiError) -> Body:
        """The body of an error."""
        ...

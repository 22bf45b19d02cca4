"""Replies to requests, told apart by the last token of one inbox; a subscription for each would cost the server two.

Invariant: who waits hears of every reply, or of the connection's break, until his box is closed.
"""

import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager

from nats.aio.msg import Msg

Sink = Callable[[Msg | None], None]
"""Takes a reply; None when the connection broke, so that no more can come."""


class Mailbox:
    """The boxes below one inbox."""

    def __init__(self) -> None:
        self.inbox = ""
        """Subject that all replies begin with; set once the client can make one."""
        self._sinks: dict[str, Sink] = {}
        self._tokens = itertools.count()

    @contextmanager
    def box(self, sink: Sink) -> Generator[str]:
        """The subject for replies that go to a sink, inside the block."""
        token = str(next(self._tokens))
        self._sinks[token] = sink
        try:
            yield f"{self.inbox}.{token}"
        finally:
            del self._sinks[token]

    async def take(self, message: Msg) -> None:
        """Hand a reply to its sink; one that comes late has none."""
        sink = self._sinks.get(message.subject.rpartition(".")[2])
        if sink:
            sink(message)

    def lose(self) -> None:
        """Tell everybody that the connection broke."""
        for sink in list(self._sinks.values()):
            sink(None)

"""What one gateway takes at once. Beyond it a request is refused by name, before anything is done for it."""

import contextlib
from collections.abc import Iterator, Sequence

from agentjet.config.settings import GatewaySettings
from agentjet.gateway.fault import ApiError

GRACE_SECONDS = 60.0
"""For all of a request beside its model call: the body, the key check, a slow reader."""


class Limits:
    """Limits of one gateway, and how many requests are within them now."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._num_requests = 0

    @property
    def seconds(self) -> float:
        """Longest that a request may take, its response's last byte included."""
        return self._settings.request_seconds + GRACE_SECONDS

    @contextlib.contextmanager
    def seat(self) -> Iterator[None]:
        """A request's place while it is answered. ApiError (429) when there is none."""
        most = self._settings.max_requests
        if self._num_requests >= most:
            why = f"{most} requests are being answered already (gateway.max_requests); try again"
            raise ApiError(429, "rate_limit_exceeded", why)
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    def check_headers(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """ApiError (431) when they are too large."""
        most = self._settings.max_header_bytes
        if sum(len(name) + len(value) for name, value in headers) > most:
            why = f"the headers exceed the limit of {most} bytes (gateway.max_header_bytes)"
            raise ApiError(431, "headers_too_large", why)

    def check_body_size(self, num_bytes: int) -> None:
        """ApiError (413) when a body is too large."""
        most = self._settings.max_body_bytes
        if num_bytes > most:
            why = f"the body exceeds the limit of {most} bytes (gateway.max_body_bytes)"
            raise ApiError(413, "body_too_large", why)

    def check_messages(self, num_messages: int) -> None:
        """ApiError (400) when a request has too many."""
        most = self._settings.max_messages
        if num_messages > most:
            why = f"{num_messages} messages exceed the limit of {most} (gateway.max_messages)"
            raise ApiError(400, "too_many_messages", why, param="messages")

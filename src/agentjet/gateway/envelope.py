"""What all answers over HTTP share, whichever dialect: one address for every client, and an id for each request.

Invariants:

- A client may be given the base URL with or without `/v1`, and may add `/v1` itself or not: all mean the same place.
- Each response names its request, under the names that the vendors' clients read.
"""

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentjet.accounting.key import PREFIX
from agentjet.schemas.ids import new_call_id

VERSION = "/v1"
REQUEST_ID_HEADERS = ("x-request-id", "request-id")


class Envelope:
    """Wraps an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, request_id = one_version(scope["path"]), f"req_{new_call_id()}"
        state = {**scope.get("state", {}), "request_id": request_id}

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name in REQUEST_ID_HEADERS:
                    headers[name] = request_id
            await send(message)

        named = {**scope, "path": path, "raw_path": path.encode("utf-8", "surrogateescape"), "state": state}
        await self._app(named, receive, send_named)


def one_version(path: str) -> str:
    """The path with `/v1` in front once, whether it stands there never or several times."""
    while path == VERSION or path.startswith(f"{VERSION}/"):
        path = path[len(VERSION) :]
    return VERSION + path


def request_id(request: Request) -> str:
    """The id that the response names."""
    return request.state.request_id


def key_of(request: Request) -> str:
    """The key of a request: `Authorization: Bearer`, or Anthropic's `x-api-key`; empty when there is none.

    Clients may send both, one of them from their environment: then the one of this gateway's form counts.
    """
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    keys = [key for key in (bearer, request.headers.get("x-api-key", "").strip()) if key]
    return next((key for key in keys if key.startswith(PREFIX)), keys[0] if keys else "")

"""HTTP around the gateway: routes, headers, limits, disconnects. It knows nothing of the bus."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentjet.gateway.fault import ApiError
from agentjet.gateway.inquiry import Caller, Inquiry

if TYPE_CHECKING:
    from agentjet.gateway.gateway import Gateway

OVERRIDDEN_HEADER = "x-agentjet-overridden"
AGENT_HEADER = "x-agentjet-agent"
_MAX_AGENT_CHARS = 200
_CLIENT_CLOSED_REQUEST = 499

T = TypeVar("T")


class _CallerGoneError(Exception):
    """The connection was closed before the answer; nobody reads what follows."""


class _EventStream(StreamingResponse):
    """Server-sent events whose source is closed however the response ends."""

    def __init__(self, events: AsyncGenerator[bytes], headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers | {"cache-control": "no-cache"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


def build_app(gateway: "Gateway", *, max_body_bytes: int) -> Starlette:
    """The application that serves a gateway."""

    async def chat(request: Request) -> Response:
        inquiry = await gateway.inquire(_caller(request), await _json(request, max_body_bytes))
        if inquiry.request.is_streamed:
            return await _streamed(request, gateway, inquiry)
        answer = await _unless_gone(request, gateway.answer(inquiry))
        return _reply(200, answer, _news(inquiry))

    async def models(request: Request) -> Response:
        names = await gateway.models(_caller(request).key)
        return _reply(200, {"object": "list", "data": [_model(name) for name in names]})

    async def model(request: Request) -> Response:
        names, name = await gateway.models(_caller(request).key), request.path_params["name"]
        if name not in names:
            why = f"model {name!r} is not served here; there are: {', '.join(names)}"
            raise ApiError(404, "model_not_found", why, param="model")
        return _reply(200, _model(name))

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name}", model),
        ],
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_exception,
            _CallerGoneError: _on_gone,
            Exception: _on_crash,
        },
    )


def _caller(request: Request) -> Caller:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    retries = request.headers.get("x-stainless-retry-count", "0")
    return Caller(
        key=key.strip() if scheme.lower() == "bearer" else "",
        agent=request.headers.get(AGENT_HEADER, "")[:_MAX_AGENT_CHARS],
        idempotency_key=request.headers.get("idempotency-key", ""),
        is_retry=retries.isdecimal() and int(retries) > 0,
    )


async def _json(request: Request, max_bytes: int) -> Any:
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > max_bytes:
                why = f"the body exceeds the limit of {max_bytes} bytes (gateway.max_body_bytes)"
                raise ApiError(413, "body_too_large", why)
    except ClientDisconnect:
        raise _CallerGoneError from None
    try:
        return orjson.loads(bytes(body))
    except orjson.JSONDecodeError as error:
        raise ApiError(400, "invalid_body", f"the body is not JSON: {error}") from None


async def _streamed(request: Request, gateway: "Gateway", inquiry: Inquiry) -> Response:
    """Headers go out with the first chunk, so that an early error still has its status."""
    chunks = gateway.stream(inquiry)
    first = await _unless_gone(request, chunks.__anext__())

    async def events() -> AsyncGenerator[bytes]:
        async with contextlib.aclosing(chunks):
            yield _event(first)
            try:
                async for chunk in chunks:
                    yield _event(chunk)
            except ApiError as error:
                yield _event(error.body())
                return
            yield b"data: [DONE]\n\n"

    return _EventStream(events(), _news(inquiry))


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled when the connection closes before it is there."""
    answer = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise _CallerGoneError
        return answer.result()
    finally:
        gone.cancel()
        if answer.cancel():
            await asyncio.gather(answer, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _news(inquiry: Inquiry) -> dict[str, str]:
    names = inquiry.session.news()
    return {OVERRIDDEN_HEADER: ", ".join(names)} if names else {}


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentjet"}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _reply(status: int, value: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _reply(error.status, error.body(), error.headers())


def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    why = f"{request.method} {request.url.path}: {error.detail}; there are /v1/chat/completions and /v1/models"
    return _on_api_error(request, ApiError(error.status_code, "unknown_endpoint", why))


def _on_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


def _on_crash(request: Request, error: Exception) -> Response:
    return _on_api_error(request, ApiError(500, "internal_error", f"the gateway failed: {type(error).__name__}"))

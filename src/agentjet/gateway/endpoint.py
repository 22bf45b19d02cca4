"""HTTP around the gateway: routes, headers, limits, disconnects. It knows nothing of the bus."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentjet.gateway.chat_reply import ChatCompletions
from agentjet.gateway.completions import Completions
from agentjet.gateway.dialect import Body, Dialect
from agentjet.gateway.envelope import Envelope, key_of, request_id
from agentjet.gateway.fault import ApiError, error_body
from agentjet.gateway.inquiry import Caller, Inquiry
from agentjet.gateway.limit import Limits
from agentjet.gateway.messages_reply import Messages, MessageTokens
from agentjet.gateway.responses_stream import Responses

if TYPE_CHECKING:
    from agentjet.gateway.gateway import Gateway

log = structlog.get_logger(__name__)

OVERRIDDEN_HEADER = "x-agentjet-overridden"
AGENT_HEADER = "x-agentjet-agent"
_MAX_AGENT_CHARS = 200
_CLIENT_CLOSED_REQUEST = 499

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Completions(), Responses(), Messages(), MessageTokens())
_PLACES = ", ".join([*(path for dialect in DIALECTS for path in dialect.paths), "/v1/models"])

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


class _DialectEndpoint:
    """One dialect over HTTP: each request has a seat and an end, and each refusal the dialect's shape."""

    def __init__(self, gateway: "Gateway", dialect: Dialect, limits: Limits) -> None:
        self._gateway, self._dialect, self._limits = gateway, dialect, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, has_begun = Request(scope, receive), False
        try:
            with self._limits.seat():
                async with asyncio.timeout(self._limits.seconds):
                    response = await self._answer(request)
                    has_begun = True
                    await response(scope, receive, send)
        except ApiError as error:
            await self._refuse(request, error)(scope, receive, send)
        except TimeoutError:
            if has_begun:
                log.warning("a response was not read in time; its connection is closed", path=request.url.path)
                return
            why = f"the request took longer than {self._limits.seconds:.0f} s; send it faster, or try again"
            await self._refuse(request, ApiError(504, "timeout", why))(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        self._limits.check_headers(request.headers.raw)
        body = await _json(request, self._limits)
        inquiry = await self._gateway.inquire(_caller(request), body, self._dialect)
        if inquiry.request.is_streamed:
            return await _streamed(request, self._gateway, inquiry)
        answer = await _unless_gone(request, self._gateway.answer(inquiry))
        return _reply(200, answer, _news(inquiry))

    def _refuse(self, request: Request, error: ApiError) -> Response:
        error.request_id = request_id(request)
        return _refusal(error, self._dialect.error(error))


def build_app(gateway: "Gateway", limits: Limits) -> Starlette:
    """The application that serves a gateway."""

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
            *(
                Route(path, _DialectEndpoint(gateway, dialect, limits), methods=["POST"])
                for dialect in DIALECTS
                for path in dialect.paths
            ),
            Route("/v1/models", models),
            Route("/v1/models/{name}", model),
        ],
        middleware=[Middleware(Envelope)],
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_exception,
            _CallerGoneError: _on_gone,
            Exception: _on_crash,
        },
    )


def _caller(request: Request) -> Caller:
    retries = request.headers.get("x-stainless-retry-count", "0")
    agent = request.headers.get(AGENT_HEADER, "")
    if len(agent) > _MAX_AGENT_CHARS:
        why = f"{AGENT_HEADER}: a name has at most {_MAX_AGENT_CHARS} characters, this one has {len(agent)}"
        raise ApiError(400, "invalid_header", why, param=AGENT_HEADER)
    return Caller(
        key=key_of(request),
        agent=agent,
        idempotency_key=request.headers.get("idempotency-key", ""),
        is_retry=retries.isdecimal() and int(retries) > 0,
    )


async def _json(request: Request, limits: Limits) -> Any:
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            limits.check_body_size(len(body))
    except ClientDisconnect:
        raise _CallerGoneError from None
    try:
        return orjson.loads(bytes(body))
    except orjson.JSONDecodeError as error:
        raise ApiError(400, "invalid_body", f"the body is not JSON: {error}") from None


async def _streamed(request: Request, gateway: "Gateway", inquiry: Inquiry) -> Response:
    """Headers go out with the first event, so that an early error still has its status."""
    stream = gateway.stream(inquiry)
    first = await _unless_gone(request, stream.__anext__())

    async def events() -> AsyncGenerator[bytes]:
        async with contextlib.aclosing(stream):
            yield first.encode()
            async for event in stream:
                yield event.encode()

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


def _reply(status: int, value: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _refusal(error, error_body(error))


def _refusal(error: ApiError, body: Body) -> Response:
    return _reply(error.status, body, error.headers())


def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    why = f"{request.method} {request.url.path}: {error.detail}; there are {_PLACES}"
    return _on_api_error(request, ApiError(error.status_code, "unknown_endpoint", why))


def _on_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


def _on_crash(request: Request, error: Exception) -> Response:
    return _on_api_error(request, ApiError(500, "internal_error", f"the gateway failed: {type(error).__name__}"))

"""Structured logs: JSON lines for machines, readable lines on a terminal.

Invariants: every line carries the actor and the run; anything like an AgentJet key, and the value of any
field named like a secret, is shortened before it is written. Logs of other packages take the same road.
"""

import logging
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

_KEY = re.compile(r"\baj-[A-Za-z0-9_\-.=]{6,}")
_SECRET_NAMES = frozenset({"api_key", "authorization", "credentials", "key", "password", "secret", "token"})
_VISIBLE_CHARS = 6


def configure(
    *, actor: str, run: str | None = None, level: str = "info", path: Path | None = None, stream: TextIO | None = None
) -> None:
    """Set up logging for this process; to be called once by an actor's main.

    Args:
        actor: Bound to every line.
        run: Bound to every line when known.
        level: Least level that is written: debug, info, warning, error.
        path: A file to append JSON lines to, instead of `stream`.
        stream: Standard error by default; readable lines when it is a terminal, JSON lines otherwise.
    """
    target = stream or sys.stderr
    handler = logging.FileHandler(path, encoding="utf-8") if path else logging.StreamHandler(target)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=_final_processors(pretty=path is None and target.isatty()),
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(actor=actor, **({"run": run} if run else {}))


def _final_processors(*, pretty: bool) -> list[Processor]:
    strip = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if pretty:
        return [strip, structlog.processors.format_exc_info, redact, structlog.dev.ConsoleRenderer()]
    return [strip, structlog.processors.format_exc_info, redact, structlog.processors.JSONRenderer(serializer=_dumps)]


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """A structlog processor that shortens secrets in every value, however deep."""
    for name, value in event.items():
        event[name] = _clean(name, value)
    return event


def _clean(name: str, value: Any) -> Any:
    if isinstance(value, str):
        secret = name.lower() in _SECRET_NAMES or name.lower().endswith(("_key", "_token", "_secret", "_password"))
        return shorten(value) if secret else _KEY.sub(lambda match: shorten(match[0]), value)
    if isinstance(value, Mapping):
        return {str(k): _clean(str(k), v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(name, item) for item in value]
    return value


def shorten(secret: str) -> str:
    """The first characters of a secret, enough to tell two apart."""
    return f"{secret[:_VISIBLE_CHARS]}..." if len(secret) > 2 * _VISIBLE_CHARS else "..."


def _dumps(event: Any, **_options: Any) -> str:
    return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()

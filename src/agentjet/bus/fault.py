"""What JetStream's numbered errors mean for a caller; knows the server's error codes and nothing else."""

from typing import Any

from agentjet.errors import AgentJetError, BusError, BusFullError, RecordTooLargeError

WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
STREAM_EXISTS_OTHERWISE = 10058
STREAM_NOT_FOUND = 10059
MESSAGE_NOT_FOUND = 10037
_MESSAGE_TOO_LARGE = 10054
_TTL_DISABLED = 10166
_NO_SPACE = frozenset({10002, 10023, 10028, 10047, 10120})
_TEMPORARY = frozenset({10008, 10009, 10104})
_STORE_FAILED = 10077
_FULL_WORDS = ("maximum", "no space", "insufficient", "resource")


def code_of(error: dict[str, Any]) -> int:
    """JetStream's own error number, 0 when the server sent none."""
    return int(error.get("err_code") or 0)


def is_temporary(error: dict[str, Any]) -> bool:
    """Whether the same request may succeed a moment later (election, start-up)."""
    return code_of(error) in _TEMPORARY


def translate(error: dict[str, Any], what: str) -> AgentJetError:
    """The error to raise for a refused request; `what` names the operation and its stream or subject."""
    code = code_of(error)
    text = str(error.get("description", "no description"))
    lowered = text.lower()
    if code in _NO_SPACE or (code == _STORE_FAILED and any(word in lowered for word in _FULL_WORDS)):
        return BusFullError(f"{what}: {text}; raise the stream's or the server's storage limit, or free disk space")
    if code == STREAM_NOT_FOUND:
        return BusError(f"{what}: the stream does not exist on this server; check the run's name")
    if code == _MESSAGE_TOO_LARGE:
        return RecordTooLargeError(f"{what}: {text}; store the payload as a blob")
    if code == _TTL_DISABLED:
        return BusError(f"{what}: {text}; create the stream with allow_message_ttl")
    return BusError(f"{what}: {text} (JetStream error {code})")

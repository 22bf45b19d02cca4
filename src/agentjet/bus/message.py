"""Stored messages as the three ways of reading deliver them: direct get, message get, and a consumer.

Invariant: headers that belong to JetStream (`Nats-...`, status) never reach the caller, so a message reads the same
whichever way it came. Own publishes are recognised by `PUBLISH_ID`, which also switches on the server's deduplication.
"""

import base64
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from nats.aio.msg import Msg

from agentjet.bus.protocol import StoredMessage

PUBLISH_ID = "Nats-Msg-Id"
"""Random per publish: the server drops a repeat within the stream's duplicate window."""
REPLY_HEADER = "AJ-Reply"
ERROR_HEADER = "AJ-Error"
_STATUS = "Status"
_INTERNAL = ("Nats-", "Status", "Description")
_FRACTION = re.compile(r"\.(\d+)")


def status_of(message: Msg) -> str | None:
    """The inline status of a control message (an empty body with a status), else None."""
    if message.data or not message.headers:
        return None
    return message.headers.get(_STATUS)


def own_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """The publisher's headers, without those the server or the transport added."""
    return {str(k): v for k, v in (headers or {}).items() if not str(k).startswith(_INTERNAL)}


def from_direct(message: Msg) -> StoredMessage:
    """A reply of the Direct Get API."""
    headers = message.headers or {}
    return StoredMessage(
        subject=headers["Nats-Subject"],
        payload=message.data,
        headers=own_headers(headers),
        sequence=int(headers["Nats-Sequence"]),
        time=parse_time(headers["Nats-Time-Stamp"]),
    )


def from_get(stored: Mapping[str, Any]) -> StoredMessage:
    """The `message` of a STREAM.MSG.GET reply."""
    return StoredMessage(
        subject=str(stored["subject"]),
        payload=base64.b64decode(stored.get("data") or ""),
        headers=own_headers(raw_headers(stored)),
        sequence=int(stored["seq"]),
        time=parse_time(str(stored["time"])),
    )


def raw_headers(stored: Mapping[str, Any]) -> dict[str, str]:
    """Every header of a STREAM.MSG.GET reply, JetStream's included."""
    return parse_headers(base64.b64decode(stored.get("hdrs") or "").partition(b"\r\n")[2])


def parse_headers(raw: bytes) -> dict[str, str]:
    """Header lines, `Name: value` each, without the line that names the protocol."""
    pairs = (line.partition(":") for line in raw.decode("utf-8", "replace").split("\r\n"))
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def from_delivery(message: Msg) -> StoredMessage:
    """A message handed out by a consumer; position and time ride in its acknowledgement subject."""
    stream_sequence, _, nanoseconds = delivery_position(message)
    return StoredMessage(
        subject=message.subject,
        payload=message.data,
        headers=own_headers(message.headers),
        sequence=stream_sequence,
        time=nanoseconds / 1e9,
    )


def delivery_position(message: Msg) -> tuple[int, int, int]:
    """(stream sequence, consumer sequence, stored-at nanoseconds) of a consumer's message."""
    tokens = message.reply.split(".")
    # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>; with a domain two
    # tokens (domain, account) come before the stream.
    base = 5 if len(tokens) == 9 else 7
    return int(tokens[base]), int(tokens[base + 1]), int(tokens[base + 2])


def num_delivered(message: Msg) -> int:
    """How often the consumer has handed the message out."""
    tokens = message.reply.split(".")
    return int(tokens[4 if len(tokens) == 9 else 6])


def parse_time(text: str) -> float:
    """Seconds since the epoch of an RFC 3339 time with nanoseconds; 0.0 for Go's zero time."""
    if text.startswith("0001-"):
        return 0.0
    fraction = _FRACTION.search(text)
    whole = datetime.fromisoformat(_FRACTION.sub("", text).replace("Z", "+00:00")).astimezone(UTC)
    return whole.timestamp() + (float(f"0.{fraction[1]}") if fraction else 0.0)

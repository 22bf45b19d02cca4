"""Signed keys of attempts: `aj-<base64url(payload)>.<base64url(HMAC-SHA256)>`.

The payload is compact JSON and says whose key it is; only the server side knows the secret. A key is checked in the
order form, signature, run, role, expiry, so a forged key learns nothing but that it is forged. Clocks may differ by
60 s. It does not know which attempt is the newest: that is the claim record's business.
"""

import base64
import binascii
import hashlib
import hmac
import json
from dataclasses import asdict, dataclass

from agentjet.errors import ForeignKeyError, KeyRejectedError

PREFIX = "aj-"
EPISODE = "episode"
"""Role of a key that plays one attempt of a ticket."""
SKEW_SECONDS = 60.0
MIN_SECRET_BYTES = 16
_MAX_KEY_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Key:
    """What a key says."""

    run: str
    ticket: str
    attempt: int
    """Stream sequence of the claim record."""
    expires: float
    """JetStream time, seconds since the epoch."""
    role: str = EPISODE


def sign(secret: bytes, key: Key) -> str:
    """The text of a key. Raises ValueError for a secret shorter than 16 bytes."""
    payload = json.dumps(asdict(key), sort_keys=True, separators=(",", ":")).encode()
    return f"{PREFIX}{_to_text(payload)}.{_to_text(_mac(secret, payload))}"


def verify(secret: bytes, text: str, *, run: str, now: float) -> Key:
    """What an episode's key says, when it is genuine, of this run and not expired.

    Args:
        secret: The run's secret.
        text: The key as the caller sent it.
        run: Id of the run that is asked.
        now: JetStream time (or the local clock, which may differ by 60 s), seconds since the epoch.

    Raises:
        ForeignKeyError: It is of another run, or no episode's.
        KeyRejectedError: It is forged, damaged or expired.

    The message says which check failed and what to do.
    """
    payload, mac = _split(text)
    if not hmac.compare_digest(_mac(secret, payload), mac):
        raise KeyRejectedError("this key is not signed by this run; take the key that the claim or the policy gave you")
    key = _parse(payload)
    check_belongs(key, run=run)
    if now > key.expires + SKEW_SECONDS:
        raise KeyRejectedError(
            f"the key of ticket {key.ticket} expired {now - key.expires:.0f} s ago; claim its ticket again"
        )
    return key


def check_belongs(key: Key, *, run: str) -> None:
    """ForeignKeyError when a key does not play episodes of this run."""
    if key.run != run:
        raise ForeignKeyError(f"this key is of run {key.run}, not of {run}; claim a ticket of this run")
    if key.role != EPISODE:
        raise ForeignKeyError(f"this key is for the role {key.role!r}, not for an episode; claim a ticket")


def peek(text: str) -> Key:
    """What a key claims, unverified: only for routing. Raises KeyRejectedError when it has not the form of a key."""
    return _parse(_split(text)[0])


def _mac(secret: bytes, payload: bytes) -> bytes:
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"a run secret holds at least {MIN_SECRET_BYTES} bytes, this one {len(secret)}")
    return hmac.new(secret, payload, hashlib.sha256).digest()


def _to_text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _to_bytes(text: str) -> bytes:
    data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    # Several texts decode to the same bytes; only the one that `sign` writes is the key.
    if _to_text(data) != text:
        raise ValueError("not canonical")
    return data


def _split(text: str) -> tuple[bytes, bytes]:
    payload, dot, mac = text.removeprefix(PREFIX).partition(".")
    if text.startswith(PREFIX) and dot and len(text) <= _MAX_KEY_CHARS:
        try:
            return _to_bytes(payload), _to_bytes(mac)
        except (ValueError, binascii.Error):
            pass
    raise KeyRejectedError("this is not an AgentJet key (aj-...); pass the key that the claim or the policy gave you")


def _parse(payload: bytes) -> Key:
    try:
        fields = json.loads(payload)
        key = Key(**fields)
    except (ValueError, TypeError, RecursionError):
        raise KeyRejectedError("this key is damaged; take the key that the claim or the policy gave you") from None
    texts = (key.run, key.ticket, key.role)
    is_whole = isinstance(key.attempt, int) and not isinstance(key.attempt, bool)
    if not is_whole or not isinstance(key.expires, int | float) or not all(isinstance(text, str) for text in texts):
        raise KeyRejectedError("this key is damaged; take the key that the claim or the policy gave you")
    return key

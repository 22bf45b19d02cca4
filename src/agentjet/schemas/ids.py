"""Names of things, as they travel in subjects and records.

Every id is a string of one or more *tokens*; a token holds `[A-Za-z0-9_-]` only, so that it can stand in a subject.

- run: `<slug>-<6 random characters>`; a deleted and reused slug therefore rejects zombies.
- group: `<pool>-<index>`, one task instance; its members share task and seed.
- slot: `<group>.<member>`, a place in the group's batch.
- ticket: `<group>.<member>.<offer>`; a re-offer of a slot is a new ticket.
- attempt: stream sequence of the claim record: unique and rising within a ticket.
- call: a ULID minted by the gateway.
- version: `<incarnation>-<step>` of a learner.
"""

import re
import secrets
import time
from typing import NamedTuple, NewType

RunId = NewType("RunId", str)
GroupId = NewType("GroupId", str)
SlotId = NewType("SlotId", str)
TicketId = NewType("TicketId", str)
CallId = NewType("CallId", str)

_TOKEN = re.compile(r"[A-Za-z0-9_-]+")
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def is_token(text: str) -> bool:
    """Whether the text can stand as one token of a subject."""
    return _TOKEN.fullmatch(text) is not None


def check_token(text: str, what: str) -> str:
    """Returns the text; ValueError names `what` when it can not stand in a subject."""
    if not is_token(text):
        raise ValueError(f"{what} {text!r} may hold letters, digits, '_' and '-' only")
    return text


def new_run_id(slug: str) -> RunId:
    """A fresh run id for a slug."""
    alphabet = "abcdefghjkmnpqrstvwxyz23456789"
    return RunId(f"{check_token(slug, 'run name')}-{''.join(secrets.choice(alphabet) for _ in range(6))}")


def group_id(pool: str, index: int) -> GroupId:
    """The group of a pool's `index`-th issued task instance."""
    return GroupId(f"{check_token(pool, 'pool')}-{index}")


def slot_id(group: GroupId, member: int) -> SlotId:
    """A member's place in its group."""
    return SlotId(f"{group}.{member}")


class TicketName(NamedTuple):
    """The parts of a ticket id."""

    group: GroupId
    member: int
    offer: int

    @property
    def id(self) -> TicketId:
        """`<group>.<member>.<offer>`."""
        return TicketId(f"{self.group}.{self.member}.{self.offer}")

    @property
    def slot(self) -> SlotId:
        """`<group>.<member>`."""
        return slot_id(self.group, self.member)

    @classmethod
    def parse(cls, ticket: str) -> "TicketName":
        """The parts of a ticket id; ValueError when it is none."""
        parts = ticket.split(".")
        if len(parts) != 3 or not is_token(parts[0]) or not (parts[1].isdecimal() and parts[2].isdecimal()):
            raise ValueError(f"{ticket!r} is not a ticket: expected <group>.<member>.<offer>")
        return cls(GroupId(parts[0]), int(parts[1]), int(parts[2]))


class Version(NamedTuple):
    """Weights of a model: the incarnation of its learner and the number of optimizer steps taken in the run."""

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.incarnation}-{self.step}"

    @classmethod
    def parse(cls, text: str) -> "Version":
        """ValueError when the text is not `<incarnation>-<step>`."""
        match = re.fullmatch(r"(\d+)-(\d+)", text)
        if match is None:
            raise ValueError(f"{text!r} is not a version: expected <incarnation>-<step>")
        return cls(int(match[1]), int(match[2]))


def new_call_id() -> CallId:
    """A ULID: 48 bits of milliseconds and 80 random bits, in Crockford's base 32 (26 characters, sorts by time)."""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return CallId("".join(_CROCKFORD[(value >> shift) & 31] for shift in range(125, -1, -5)))

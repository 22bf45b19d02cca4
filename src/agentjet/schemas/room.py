"""A question to one engine before it is asked for a reply: whether it is there, and has a place.

Nothing of this is stored: an engine that does not answer has none.
"""

from agentjet.schemas.record import Record


class RoomRequest(Record):
    """A gateway would like to send a question to the engine that holds its conversation's cache."""

    schema_name = "room_request"

    is_promise: bool = True
    """A place is to be kept for the question, which follows. False: only whether the engine is there is asked."""


class RoomGrant(Record):
    """The engine's answer."""

    schema_name = "room_grant"

    has_room: bool
    """Whether the question may come; one that waits for any engine is answered sooner otherwise."""

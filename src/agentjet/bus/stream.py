"""Streams of a NATS server: how a `StreamSpec` reads in JetStream's terms, creation, widening, state.

Invariant: widening only ever grows: subjects are added, limits raised, never the reverse, so two processes with
different configurations can not shrink a stream under each other.
"""

from typing import Any

from agentjet.bus.connection import NatsConnection
from agentjet.bus.fault import STREAM_EXISTS_OTHERWISE, code_of, translate
from agentjet.bus.message import parse_time
from agentjet.bus.protocol import ConsumerPlace, StreamInfo, StreamSpec
from agentjet.errors import BusError

_DUPLICATE_WINDOW_SECONDS = 60.0
"""Longer than any publish retries; the server keeps publish ids that long."""


def config_of(spec: StreamSpec) -> dict[str, Any]:
    """The server's configuration for a spec."""
    window = min(_DUPLICATE_WINDOW_SECONDS, spec.max_age_seconds or _DUPLICATE_WINDOW_SECONDS)
    return {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "retention": "workqueue" if spec.work_queue else "limits",
        "storage": "file",
        "max_bytes": spec.max_bytes,
        "max_age": int(spec.max_age_seconds * 1e9),
        "discard": "old" if spec.discard_old else "new",
        "num_replicas": spec.replicas,
        "allow_msg_ttl": spec.allow_message_ttl,
        "allow_direct": spec.replicas == 1,
        "duplicate_window": int(window * 1e9),
    }


async def ensure(connection: NatsConnection, spec: StreamSpec) -> None:
    """Create the stream, or widen the one of that name.

    Raises:
        BusFullError: The server's storage can not hold `max_bytes`.
        BusError: A stream of that name exists with another retention.
    """
    what = f"stream {spec.name}"
    config = config_of(spec)
    reply = await connection.api_reply(f"STREAM.CREATE.{spec.name}", config, what=what)
    if "error" not in reply:
        return
    if code_of(reply["error"]) != STREAM_EXISTS_OTHERWISE:
        raise translate(reply["error"], what)
    info = await connection.api(f"STREAM.INFO.{spec.name}", what=what)
    present: dict[str, Any] = info["config"]
    if present["retention"] != config["retention"]:
        raise BusError(
            f"{what} exists with retention {present['retention']}, needed is {config['retention']}; use another run"
        )
    await connection.api(f"STREAM.UPDATE.{spec.name}", widened(present, spec), what=what)


def widened(present: dict[str, Any], spec: StreamSpec) -> dict[str, Any]:
    """The configuration of a stream that is there, grown to hold the spec as well."""
    replicas = max(int(present["num_replicas"]), spec.replicas)
    return present | {
        "subjects": sorted({*present["subjects"], *spec.subjects}),
        "max_bytes": max(int(present["max_bytes"]), spec.max_bytes),
        "allow_msg_ttl": bool(present.get("allow_msg_ttl")) or spec.allow_message_ttl,
        "num_replicas": replicas,
        "allow_direct": replicas == 1,
    }


async def names(connection: NatsConnection, prefix: str) -> list[str]:
    """Sorted names of the streams that start with `prefix`."""
    found: list[str] = []
    offset = 0
    while True:
        reply = await connection.api("STREAM.NAMES", {"offset": offset}, what="listing streams")
        page: list[str] = reply.get("streams") or []
        found += [name for name in page if name.startswith(prefix)]
        offset += len(page)
        if not page or offset >= int(reply["total"]):
            return sorted(found)


async def info(connection: NatsConnection, name: str, *, with_consumers: bool) -> StreamInfo:
    """The stream's state, with each durable consumer's backlog where asked for."""
    what = f"stream {name}"
    reply = await connection.api(f"STREAM.INFO.{name}", what=what)
    state = reply["state"]
    consumers, places = await _consumers(connection, name) if with_consumers else ({}, {})
    return StreamInfo(
        name=name,
        num_messages=int(state["messages"]),
        num_bytes=int(state["bytes"]),
        max_bytes=int(reply["config"]["max_bytes"]),
        first_sequence=int(state["first_seq"]),
        last_sequence=int(state["last_seq"]),
        last_time=parse_time(str(state["last_ts"])) if int(state["last_seq"]) else 0.0,
        consumers=consumers,
        places=places,
        time=parse_time(str(reply["ts"])) if "ts" in reply else 0.0,
    )


async def _consumers(connection: NatsConnection, name: str) -> tuple[dict[str, int], dict[str, ConsumerPlace]]:
    backlogs, places = dict[str, int](), dict[str, ConsumerPlace]()
    offset = 0
    while True:
        reply = await connection.api(f"CONSUMER.LIST.{name}", {"offset": offset}, what=f"stream {name}")
        page: list[dict[str, Any]] = reply.get("consumers") or []
        for consumer in page:
            durable = consumer["config"].get("durable_name")
            if durable:
                backlogs[str(durable)] = int(consumer["num_pending"]) + int(consumer["num_ack_pending"])
                floor = int(consumer["ack_floor"]["stream_seq"])
                places[str(durable)] = ConsumerPlace(consumer["config"].get("filter_subject") or ">", floor + 1)
        offset += len(page)
        if not page or offset >= int(reply["total"]):
            return backlogs, places

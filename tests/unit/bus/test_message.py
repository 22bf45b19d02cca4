import base64

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from agentjet.bus.connection import _Client
from agentjet.bus.message import (
    delivery_position,
    from_delivery,
    from_direct,
    from_get,
    num_delivered,
    parse_headers,
    parse_time,
    status_of,
)


def message(**fields: object) -> Msg:
    return Msg(_client=Client(), **fields)  # type: ignore[arg-type]


def test_times_keep_their_fraction_and_the_zero_time_is_zero():
    assert parse_time("2026-11-30T13:44:41.230975443Z") == pytest.approx(1796046281.230975443, abs=1e-6)
    assert parse_time("2026-11-30T13:44:41Z") == 1796046281.0
    assert parse_time("2026-11-30T14:44:41.5+01:00") == 1796046281.5
    assert parse_time("0001-01-01T00:00:00Z") == 0.0


def test_a_delivery_is_read_with_and_without_a_domain():
    plain = message(subject="s", data=b"x", reply="$JS.ACK.S.dur.3.41.7.1796046281230566299.4")
    assert delivery_position(plain) == (41, 7, 1796046281230566299)
    assert num_delivered(plain) == 3
    domain = message(subject="s", data=b"x", reply="$JS.ACK.hub.acc.S.dur.3.41.7.1796046281230566299.4.rnd")
    assert delivery_position(domain) == delivery_position(plain)
    assert num_delivered(domain) == 3
    assert from_delivery(plain).time == pytest.approx(1796046281.230566, abs=1e-5)


def test_the_servers_headers_never_reach_the_reader():
    direct = message(
        subject="_INBOX.x",
        data=b"body",
        headers={
            "AJ-Schema": "call/1.0",
            "Nats-Msg-Id": "1",
            "Nats-Subject": "s.a",
            "Nats-Sequence": "5",
            "Nats-Time-Stamp": "2026-11-30T13:44:41Z",
        },
    )
    stored = {
        "subject": "s.a",
        "seq": 5,
        "time": "2026-11-30T13:44:41Z",
        "data": base64.b64encode(b"body").decode(),
        "hdrs": base64.b64encode(b"NATS/1.0\r\nAJ-Schema: call/1.0\r\nNats-Msg-Id: 1\r\n\r\n").decode(),
    }
    assert from_direct(direct) == from_get(stored)
    assert from_get(stored).headers == {"AJ-Schema": "call/1.0"}


def test_only_an_empty_message_with_a_status_is_a_status():
    assert status_of(message(data=b"", headers={"Status": "404"})) == "404"
    assert status_of(message(data=b"x", headers={"Status": "404"})) is None
    assert status_of(message(data=b"")) is None


def test_headers_read_as_nats_py_reads_them():
    lines = (
        "AJ-Schema: call/1.0\r\nNats-Subject:\taj.r.call\r\nEmpty:\r\nTime: 10:20\r\nno colon\r\nName: Žižkov\r\n\r\n"
    )
    raw = lines.encode()
    assert parse_headers(raw) == Client._parse_header_lines(raw)
    assert _Client._parse_header_lines is parse_headers
    broken = b"Name: \xff\r\n"
    assert parse_headers(broken) == Client._parse_header_lines(broken) == {"Name": "\ufffd"}

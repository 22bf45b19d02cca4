import contextlib
import importlib.util
import math
import sys
from pathlib import Path

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentjet.errors import RecordError, RecordTooLargeError, UnknownSchemaError
from agentjet.schemas.call import Call, FinishReason, Usage
from agentjet.schemas.claim import ClaimRequest
from agentjet.schemas.codec import SCHEMA_HEADER, decode, decode_as, encode, registry
from agentjet.schemas.event import Event
from agentjet.schemas.ids import CallId, RunId
from agentjet.schemas.readable import as_json
from agentjet.schemas.sampling import Sampling

_spec = importlib.util.spec_from_file_location("record_strategy", Path(__file__).with_name("record_strategy.py"))
assert _spec and _spec.loader
record_strategy = importlib.util.module_from_spec(_spec)
sys.modules["record_strategy"] = record_strategy
_spec.loader.exec_module(record_strategy)

NAMES = sorted(registry())
CLAIM = ClaimRequest(run=RunId("r-1"), ticket="g-0.0.0", worker="w")


def call(**changes) -> Call:
    fields = {
        "run": RunId("r-1"),
        "call": CallId("C"),
        "ticket": "g-0.0.0",
        "attempt": 1,
        "model": "m",
        "engine": "e",
        "generation": "g",
        "prompt_ids": (1, 2),
        "completion_ids": (3, 4),
        "logprobs": (-0.5, -1.5),
        "versions": ("1-0",),
        "sampling": Sampling(),
        "messages": ({"role": "user", "content": "x"},),
        "message": {"role": "assistant", "content": "y"},
        "finish_reason": FinishReason.STOP,
        "usage": Usage(prompt_tokens=2, completion_tokens=2),
    }
    return Call(**(fields | changes))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_every_record_comes_back_as_it_was(name, data):
    cls = registry()[name]
    record = data.draw(record_strategy.records(cls))
    assert decode_as(cls, *encode(record)) == record


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(body=st.binary(max_size=64) | record_strategy.JSON.map(msgpack.packb))
def test_any_bytes_give_a_record_or_a_named_error(name, body):
    with contextlib.suppress(RecordError):
        decode({SCHEMA_HEADER: registry()[name].schema_header()}, body)


@given(text=st.text(max_size=20) | st.builds("{}/{}".format, st.sampled_from(NAMES), st.text(max_size=5)))
def test_any_header_gives_a_record_or_a_named_error(text):
    with contextlib.suppress(RecordError):
        decode({SCHEMA_HEADER: text}, encode(CLAIM)[1])


def test_absent_header_is_named():
    with pytest.raises(RecordError, match="no AJ-Schema header"):
        decode({}, b"")


@pytest.mark.parametrize("value", [1, None, b"x", ["x"], True])
def test_wrong_type_is_refused_by_field(value):
    headers, _ = encode(CLAIM)
    body = msgpack.packb({"run": "r-1", "ticket": value, "worker": "w"})
    with pytest.raises(RecordError, match="claim_request record, field ticket"):
        decode(headers, body)


def test_number_is_not_read_from_text():
    headers, body = encode(call())
    fields = msgpack.unpackb(body) | {"attempt": "1"}
    with pytest.raises(RecordError, match="field attempt"):
        decode(headers, msgpack.packb(fields))


def test_missing_field_is_refused():
    headers, _ = encode(CLAIM)
    with pytest.raises(RecordError, match="field worker"):
        decode(headers, msgpack.packb({"run": "r-1", "ticket": "t"}))


def test_half_a_token_id_is_refused():
    headers, body = encode(call())
    fields = msgpack.unpackb(body) | {"prompt_ids": b"\x01\x02\x03"}
    with pytest.raises(RecordError, match="not a whole number of int32"):
        decode(headers, msgpack.packb(fields))


def test_field_of_a_newer_minor_is_ignored():
    headers = {SCHEMA_HEADER: "claim_request/1.9"}
    fields = msgpack.unpackb(encode(CLAIM)[1]) | {"colour": "blue"}
    assert decode(headers, msgpack.packb(fields)) == CLAIM


@pytest.mark.parametrize("header", ["claim_request/2.0", "claim_request/0.1", "shopping_list/1.0"])
def test_unknown_schema_or_major_is_named(header):
    with pytest.raises(UnknownSchemaError, match="a newer AgentJet wrote it"):
        decode({SCHEMA_HEADER: header}, encode(CLAIM)[1])


def test_other_schema_than_expected_is_named():
    with pytest.raises(RecordError, match="expected a call record, found claim_request"):
        decode_as(Call, *encode(CLAIM))


def test_record_above_the_limit_is_refused():
    _, body = encode(CLAIM)
    assert encode(CLAIM, max_bytes=len(body))[1] == body
    with pytest.raises(RecordTooLargeError, match="exceeds the payload limit"):
        encode(CLAIM, max_bytes=len(body) - 1)


def test_log_probs_that_are_no_numbers_survive():
    record = call(logprobs=(math.nan, -math.inf))
    back = decode_as(Call, *encode(record))
    assert math.isnan(back.logprobs[0])
    assert back.logprobs[1] == -math.inf


def test_log_probs_are_float32_in_memory_and_on_the_wire():
    record = call(logprobs=(-0.1, -0.2))
    assert record.logprobs[0] != -0.1
    assert decode_as(Call, *encode(record)).logprobs == record.logprobs


def test_ids_are_little_endian_int32_on_the_wire():
    fields = msgpack.unpackb(encode(call(prompt_ids=(1, 258)))[1])
    assert fields["prompt_ids"] == b"\x01\x00\x00\x00\x02\x01\x00\x00"


def test_id_beyond_int32_is_refused():
    with pytest.raises(ValueError, match="less than"):
        call(prompt_ids=(2**31,))


def test_deeply_nested_body_is_a_named_error():
    headers, _ = encode(Event(run=RunId("r-1"), actor="a", kind="k"))
    with pytest.raises(RecordError):
        decode(headers, b"\x91" * 100_000)


def test_readable_json_lists_ids_and_keeps_every_field():
    shown = as_json(call(logprobs=(math.nan, -0.5)))
    assert shown["schema"] == "call/1.1"
    assert shown["prompt_ids"] == [1, 2]
    assert shown["logprobs"] == [None, -0.5]
    assert shown["finish_reason"] == "stop"
    assert set(shown) == {"schema", *Call.model_fields}

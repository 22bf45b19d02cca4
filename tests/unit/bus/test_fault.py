import pytest

from agentjet.bus.fault import is_temporary, translate
from agentjet.errors import BusError, BusFullError, RecordTooLargeError


@pytest.mark.parametrize(
    ("code", "description", "expected"),
    [
        (10077, "maximum bytes exceeded", BusFullError),
        (10077, "write /data/1.blk: no space left on device", BusFullError),
        (10077, "checksum mismatch", BusError),
        (10047, "insufficient storage resources available", BusFullError),
        (10023, "insufficient resources", BusFullError),
        (10059, "stream not found", BusError),
        (10054, "message size exceeds maximum allowed", RecordTooLargeError),
        (12345, "something new", BusError),
    ],
)
def test_each_server_error_becomes_the_one_a_caller_acts_on(code: int, description: str, expected: type[Exception]):
    error = translate({"code": 400, "err_code": code, "description": description}, "storing x")
    assert type(error) is expected
    assert str(error).startswith("storing x: ")


def test_only_elections_and_start_up_are_temporary():
    assert is_temporary({"err_code": 10008})
    assert not is_temporary({"err_code": 10077})
    assert not is_temporary({})

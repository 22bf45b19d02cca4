"""Reading by Direct Get, as far as no server is needed."""

from types import SimpleNamespace
from typing import Any

import pytest
from nats.aio.msg import Msg

from agentjet.bus.reader import StreamReader
from agentjet.errors import BusError


class Refusing:
    """A connection to a server that refuses batches."""

    async def api(self, endpoint: str, **_: Any) -> dict[str, Any]:
        return {"config": {"allow_direct": True, "num_replicas": 1}, "state": {"last_seq": 5}}

    async def connected(self, timeout_seconds: float) -> bool:
        return True

    async def ask_many(self, subject: str, request: dict[str, Any], *, timeout_seconds: float):
        headers = {"Status": "408", "Description": "Bad Request"}
        yield Msg(SimpleNamespace(), subject="inbox", headers=headers)  # type: ignore[arg-type]


async def test_a_refused_batch_is_an_error_and_not_asked_for_again_and_again():
    reader = StreamReader(Refusing())  # type: ignore[arg-type]
    with pytest.raises(BusError, match="Bad Request"):
        async for _ in reader.scan("S"):
            raise AssertionError

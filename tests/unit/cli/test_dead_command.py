"""What `agentjet dead retry` says while there is no new group."""

import pytest

from agentjet.bus.memory import MemoryBus
from agentjet.bus.record import answering
from agentjet.cli.dead import ask_until
from agentjet.errors import UserError
from agentjet.schemas import subject
from agentjet.schemas.claim import RetryReply, RetryRequest
from agentjet.schemas.ids import RunId

RUN = RunId("run-aaaaaa")


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("full", r"no room for group p-1 within 0 s \(`agentjet status` says what holds admission up\)"),
        ("busy", "the curriculum is busy and did not say within 0 s"),
        ("there is no group p-1", "group p-1 is not retried: there is no group p-1"),
    ],
)
async def test_each_reason_for_no_group_has_its_own_sentence(memory_bus: MemoryBus, reason: str, said: str):
    async def answer(_: RetryRequest) -> RetryReply:
        return RetryReply(granted=False, reason=reason)

    async with memory_bus.serve(subject.retry_service(RUN), answering(RetryRequest, answer), queue="q"):
        with pytest.raises(UserError, match=said):
            await ask_until(memory_bus, RetryRequest(run=RUN, group="p-1"), 0.0)


async def test_without_a_curriculum_it_says_what_to_start(memory_bus: MemoryBus):
    with pytest.raises(UserError, match="is its curriculum running\\? `agentjet up` goes on with it"):
        await ask_until(memory_bus, RetryRequest(run=RUN, group="p-1"), 0.0)

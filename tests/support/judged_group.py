"""Ends of a judged group, for the tests of the reward stage."""

from agentjet.schemas.episode import EndStatus, Episode, Fault
from agentjet.schemas.ids import GroupId, RunId
from agentjet.schemas.task import Ticket

RUN = RunId("test-aaaaaa")
GROUP = GroupId("p-0")


def end(member: int, status: EndStatus = EndStatus.COMPLETED, *, offer: int = 0, size: int = 2, **fields) -> Episode:
    """The end of a member's offer; `kind` is that of its fault."""
    ticket = Ticket(
        run=RUN,
        pool="p",
        group=GROUP,
        member=member,
        offer=offer,
        group_size=size,
        max_offers=3,
        models=("m",),
        task={"answer": "4"},
        seed=1,
        deadline_seconds=60.0,
        is_judged=True,
    )
    kind = fields.pop("kind", "ToolError")
    fault = None if status is EndStatus.COMPLETED else Fault(kind=kind, message="gone")
    common = {"run": RUN, "ticket": ticket, "attempt": 3, "status": status, "calls": {"m": ("c",)}, "fault": fault}
    return Episode.model_validate(common | fields)

"""Playing the task of a dead group once more: a new group with the same task and seed.

Invariants:

- A group has one retry: the ledger's issue names the group that it stands for, so asking again gives the same one.
- A retry is admitted like any group, so it may have to wait for room; it comes before new tasks of its pool. What waits
  is kept in memory only: after a restart of the curriculum it has to be asked for again.
"""

import asyncio
from collections.abc import Callable

import structlog

from agentjet.bus.protocol import Bus
from agentjet.curriculum.course import Course
from agentjet.curriculum.dead import has_dead_slot, issues_of
from agentjet.errors import BusError
from agentjet.schemas.claim import RetryReply, RetryRequest
from agentjet.schemas.ids import RunId, group_id
from agentjet.schemas.ledger import GroupIssue
from agentjet.schemas.task import EpisodeKind

log = structlog.get_logger(__name__)

ISSUE_SECONDS = 2.0
"""How long an answer waits for the new group before it says "full"."""
_LOOK_SECONDS = 0.05


class RetryDesk:
    """Answers requests for retries.

    Args:
        bus: Where the ledger and the scores are read.
        run: The run.
        course: Issues what is owed.
        wake: Makes the curriculum look at once what can be issued.
    """

    def __init__(self, bus: Bus, run: RunId, course: Course, wake: Callable[[], None]) -> None:
        self._bus, self._run, self._course, self._wake = bus, run, course, wake

    async def retry(self, request: RetryRequest) -> RetryReply:
        """The new group, or why there is none now."""
        if request.run != self._run:
            return RetryReply(granted=False, reason=f"this curriculum leads run {self._run}, not {request.run}")
        try:
            known = self._course.retry_of(request.group)
            refusal = None if known else await self._owe(request.group)
        except BusError as error:
            log.warning("a retry has to wait", group=request.group, error=str(error))
            return RetryReply(granted=False, reason="busy")
        if refusal is not None:
            return RetryReply(granted=False, reason=refusal)
        return await self._issued(request.group)

    async def _owe(self, group: str) -> str | None:
        """Have the group's task issued again; returns why it can not be."""
        issue = await self._find(group)
        if issue is None:
            return f"there is no group {group} in run {self._run}; `agentjet dead ls` lists what died"
        refusal = self._refusal(group, issue)
        if refusal is None and not await has_dead_slot(self._bus, self._run, issue):
            refusal = f"no slot of group {group} is dead; `agentjet dead ls` lists those that are"
        if refusal is None and self._course.is_final(issue.pool):
            refusal = "every group of the run's last step is out; raise run.num_steps and go on with `agentjet up`"
        if refusal is None:
            self._course.owe(issue)
            self._wake()
        return refusal

    async def _find(self, group: str) -> GroupIssue | None:
        async for issue in issues_of(self._bus, self._run):
            if group_id(issue.pool, issue.index) == group:
                return issue
        return None

    def _refusal(self, group: str, issue: GroupIssue) -> str | None:
        course = self._course
        if issue.kind is EpisodeKind.EVAL:
            return f"group {group} was an evaluation; play it with `agentjet eval CHECKPOINT`"
        if issue.client_group:
            return f"group {group} was a client's own; its client has to open the task under a new group name"
        if issue.pool not in course.training_pools or issue.pool not in course.orders:
            return f"pool {issue.pool} is no longer configured with tasks and training; put it back first"
        return None

    async def _issued(self, group: str) -> RetryReply:
        for _ in range(round(ISSUE_SECONDS / _LOOK_SECONDS)):
            issued = self._course.retry_of(group)
            if issued is not None:
                return RetryReply(granted=True, group=issued)
            await asyncio.sleep(_LOOK_SECONDS)
        return RetryReply(granted=False, reason="full")

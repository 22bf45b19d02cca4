"""A group before its judge: who is heard, when, and what becomes of the verdicts. Pure.

Invariants:

- A slot has settled once it has a completed end, or one that closes it: dead, a prompt that can never fit, a failure of
  its last offer. The score of a failure says which those are, here as everywhere (`Score.closes_slot`).
- Whether the group can be judged depends on its stored ends alone, which never change: a later look sees at least as
  many, so the answer goes from no to yes and never back.
- A group has one judgement for ever. A member without a reward in it is therefore dead, not invalid: another offer of
  its slot could not be judged any more.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentjet.reward.judge import MAX_REASON
from agentjet.reward.scorer import dead, question, scored, unscored
from agentjet.schemas.episode import EndStatus, Episode
from agentjet.schemas.ids import GroupId
from agentjet.schemas.judgement import Judgement, Verdict
from agentjet.schemas.score import Score

NOT_JUDGED = "not_judged"
"""Kind of the fault of a completed episode that its group's judgement gives no reward."""


def settles_slot(end: Episode) -> bool:
    """Whether no further offer of the end's slot is to be waited for."""
    score = unscored(end)
    return score is None or score.closes_slot


@dataclass(frozen=True, slots=True)
class Panel:
    """A group as its stored ends show it.

    Args:
        ends: Of the group, at least one, in any order: of every member and every offer that has ended.
    """

    ends: Sequence[Episode]

    @property
    def group(self) -> GroupId:
        """The group."""
        return self.ends[0].ticket.group

    @property
    def pool(self) -> str:
        """The group's pool."""
        return self.ends[0].ticket.pool

    @property
    def num_open(self) -> int:
        """Members whose slot has not settled; the judge waits for them."""
        return self.ends[0].ticket.group_size - len({end.ticket.member for end in self.ends if settles_slot(end)})

    @property
    def completed(self) -> list[Episode]:
        """The episodes to be judged, by member."""
        heard = [end for end in self.ends if end.status is EndStatus.COMPLETED]
        return sorted(heard, key=lambda end: (end.ticket.member, end.ticket.offer))

    def question(self) -> dict[str, Any]:
        """What a judge is told, as `agentjet.reward.judge` wants it."""
        completed = self.completed
        return {"task": completed[0].ticket.task, "episodes": [_told(end) for end in completed]}

    def judged(self, judge: str, verdicts: Iterable[Mapping[str, Any]]) -> Judgement:
        """The judgement with a judge's answer; verdicts in the order of `completed`."""
        given = zip(self.completed, verdicts, strict=True)
        return self._judgement(judge, [Verdict(ticket=end.ticket.id, **verdict) for end, verdict in given])

    def unjudged(self, judge: str, reason: str) -> Judgement:
        """The judgement of a judge that has none to give: no member has a reward."""
        why = reason[:MAX_REASON]
        return self._judgement(judge, [Verdict(ticket=end.ticket.id, reason=why) for end in self.completed])

    def _judgement(self, judge: str, verdicts: list[Verdict]) -> Judgement:
        return Judgement(run=self.ends[0].run, group=self.group, judge=judge, verdicts=tuple(verdicts))

    def scores(self, judgement: Judgement) -> list[Score]:
        """One score for each completed member, from what is stored alone."""
        verdicts = {verdict.ticket: verdict for verdict in judgement.verdicts}
        return [_score(end, verdicts.get(end.ticket.id), judgement.judge) for end in self.completed]


def _told(end: Episode) -> dict[str, Any]:
    return question(end)["episode"] | {"member": end.ticket.member, "reward": end.reward}


def _score(end: Episode, verdict: Verdict | None, judge: str) -> Score:
    if verdict is None:
        return dead(end, NOT_JUDGED, "its group had been judged before it ended", judged_by=judge)
    if verdict.reward is None:
        reason = verdict.reason or "the judge gave it no reward"
        return dead(end, NOT_JUDGED, f"{judge}: {reason}" if judge else reason, judged_by=judge)
    return scored(end, verdict.model_dump(exclude={"ticket", "reason"}), judged_by=judge)

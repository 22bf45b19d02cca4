"""`agentjet audit`: is every issued episode accounted for, exactly once?"""

from dataclasses import asdict

from agentjet.accounting.audit import AuditReport, Difference
from agentjet.cli.output import readable_seconds, write_json, write_line
from agentjet.cli.target import Target, find_run, open_bus
from agentjet.curriculum.audit import read_audit


async def audit(*, target: Target | None = None, json: bool = False) -> int:
    """What was issued, ended, scored, sampled and settled, and the differences. Exit code 1 for a loss or a double.

    Args:
        json: One JSON object.
    """
    settings = (target or Target()).settings()
    async with open_bus(settings) as bus:
        run = await find_run(bus, settings)
        report = await read_audit(bus, run)
    if json:
        write_json({"run": run, **asdict(report)})
    else:
        for line in lines(report):
            write_line(line)
    return 1 if report.lost or report.duplicated else 0


def lines(report: AuditReport) -> list[str]:
    """The report for people."""
    return [
        f"issued   {report.issued} tickets in {report.groups} groups{_rest(report.issued_not_ended, 'not ended')}",
        f"ended    {report.ended}{_rest(report.ended_not_scored, 'not scored')}",
        f"scored   {report.scored}{_rest(report.scored_not_sampled, 'not sampled')}",
        f"sampled  {report.sampled}{_rest(report.sampled_not_settled, 'not settled')}",
        f"settled  {report.settled} slots; {report.trained} samples trained, {report.dropped} groups dropped",
        f"lost {report.lost}, duplicated {report.duplicated}",
        *(f"! {problem}" for problem in report.problems),
    ]


def _rest(difference: Difference, what: str) -> str:
    if not difference.count:
        return ""
    age = readable_seconds(difference.oldest_age_seconds)
    return f"; {difference.count} {what} yet, the oldest {difference.oldest_id} for {age}"

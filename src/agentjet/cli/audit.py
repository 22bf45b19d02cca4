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
    """The report for people: each number, and in words why it is not the one before it."""
    return [
        _line("issued", f"{report.issued} tickets in {_count(report.groups, 'group')}"),
        _line(
            "ended",
            report.ended,
            _open(report.issued_not_ended, "not ended"),
            _said(report.buried, "of them by the curriculum, as nobody ended them in time"),
        ),
        _line(
            "scored",
            report.scored,
            _failed(report),
            _open(report.ended_not_scored, "neither scored nor failed"),
            _said(report.unjudged, "of these wait for others of their group, to be judged together"),
        ),
        _line(
            "sampled",
            f"{report.sampled} samples and tombstones"
            + (f" of {_count(report.sampled_slots, 'slot')}" if report.sampled_slots != report.sampled else ""),
            _open(report.scored_not_sampled, "not sampled"),
            _said(report.evaluated, "of evaluations, which reach no learner"),
            _said(report.reoffered, "played again instead"),
        ),
        _line(
            "settled",
            f"{_count(report.settled, 'slot')}; {_count(report.trained, 'sample')} trained",
            _open(report.sampled_not_settled, "not settled"),
            _said(report.untrained, f"not trained: of {_count(report.dropped, 'dropped group')}, or without a reward"),
        ),
        f"lost {report.lost}, duplicated {report.duplicated}",
        *(f"! {problem}" for problem in report.problems),
    ]


def _line(name: str, value: object, *differences: str) -> str:
    return "; ".join([f"{name:<8} {value}", *(one for one in differences if one)])


def _open(difference: Difference, what: str) -> str:
    if not difference.count:
        return ""
    age = readable_seconds(difference.oldest_age_seconds)
    return f"{difference.count} {what} yet, the oldest {difference.oldest_id} for {age}"


def _failed(report: AuditReport) -> str:
    """Failures, which are no scores, and what became of them."""
    if not report.failed:
        return ""
    over = report.failed - report.reoffered
    fates = [_said(report.reoffered, "played again"), _said(over, "dead")]
    return f"{report.failed} failed ({', '.join(fate for fate in fates if fate)})"


def _said(count: int, what: str) -> str:
    return f"{count} {what}" if count else ""


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{_s(count)}"


def _s(count: int) -> str:
    return "" if count == 1 else "s"

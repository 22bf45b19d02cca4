"""`agentjet dead ls|show|retry`: slots that got no reward, why, and playing their tasks once more."""

import asyncio
import time
from dataclasses import asdict

from agentjet.bus.protocol import Bus
from agentjet.bus.record import ask
from agentjet.cli.output import readable_seconds, write_json, write_line
from agentjet.cli.target import Target, find_run, open_bus
from agentjet.curriculum.dead import DeadSlot, OfferSeen, dead_slots, history_of
from agentjet.errors import BusError, BusTimeoutError, UsageError, UserError
from agentjet.schemas import subject
from agentjet.schemas.claim import RetryReply, RetryRequest
from agentjet.schemas.ids import RunId, TicketName
from agentjet.schemas.readable import as_json
from agentjet.schemas.score import Outcome, Score

_ASK_SECONDS = 10.0
_AGAIN_SECONDS = 0.5


async def ls(*, target: Target | None = None, json: bool = False) -> None:
    """List the slots whose last offer failed or that were buried, oldest first.

    Args:
        json: One JSON list.
    """
    settings = (target or Target()).settings()
    async with open_bus(settings) as bus:
        run = await find_run(bus, settings)
        found = await dead_slots(bus, run)
    now = time.time()
    if json:
        write_json([asdict(one) | {"age_seconds": max(0.0, now - one.time)} for one in found])
        return
    for one in found:
        write_line(_line(one, now))
    if not found:
        write_line(f"nothing is dead in run {run}")


async def show(slot: str, *, target: Target | None = None, json: bool = False) -> None:
    """Every offer of a slot: who claimed it, how it ended, why it has no reward.

    Args:
        slot: A slot or one of its tickets, for example guess-7.0 or guess-7.0.2.
        json: One JSON object.
    """
    name = _name(slot)
    settings = (target or Target()).settings()
    async with open_bus(settings) as bus:
        run = await find_run(bus, settings)
        offers = await history_of(bus, run, name.slot)
    if not offers:
        raise UserError(
            f"run {run} has no record of slot {name.slot}; it was not played yet, or its records are purged"
        )
    if json:
        write_json({"run": run, "slot": name.slot, "offers": [_as_json(offer) for offer in offers]})
        return
    for offer in offers:
        for line in _lines(offer):
            write_line(line)


async def retry(group: str, *, wait_seconds: float = 60.0, target: Target | None = None, json: bool = False) -> None:
    """Play a dead group's task once more, as a new group with the same seed; prints its id.

    Asking again for the same group gives the same new one.

    Args:
        group: The group, or one of its slots or tickets, for example guess-7.
        wait_seconds: How long room within the staleness bound is waited for.
        json: One JSON object.
    """
    settings = (target or Target()).settings()
    dead = _name(group).group
    async with open_bus(settings) as bus:
        run = await find_run(bus, settings)
        issued = await ask_until(bus, RetryRequest(run=run, group=dead), wait_seconds)
    if json:
        write_json({"run": run, "dead": dead, "group": issued})
    else:
        write_line(issued)


async def ask_until(bus: Bus, request: RetryRequest, wait_seconds: float) -> str:
    """The new group's id; UserError when it is refused or not there in time."""
    give_up = time.monotonic() + wait_seconds
    while True:
        reply = await _ask(bus, request)
        if reply.granted:
            return reply.group
        if reply.reason not in ("full", "busy"):
            raise UserError(f"group {request.group} is not retried: {reply.reason}")
        if time.monotonic() >= give_up:
            raise UserError(_late(request.group, reply.reason, wait_seconds))
        await asyncio.sleep(_AGAIN_SECONDS)


def _late(group: str, reason: str, seconds: float) -> str:
    if reason == "busy":
        return f"the curriculum is busy and did not say within {seconds:g} s what becomes of group {group}; ask again"
    return (
        f"no room for group {group} within {seconds:g} s (`agentjet status` says what holds admission up); "
        "it is issued as soon as there is room, ask again for its id"
    )


async def _ask(bus: Bus, request: RetryRequest) -> RetryReply:
    to = subject.retry_service(RunId(request.run))
    try:
        return await ask(bus, to, request, RetryReply, timeout_seconds=_ASK_SECONDS)
    except BusTimeoutError:
        return RetryReply(granted=False, reason="busy")
    except BusError as error:
        raise UserError(
            f"nobody retries groups of run {request.run}: is its curriculum running? `agentjet up` goes on with it "
            f"({error})"
        ) from None


def _name(text: str) -> TicketName:
    """The group, slot or ticket that is meant."""
    parts = text.split(".")
    try:
        return TicketName.parse(".".join([*parts, *["0"] * (3 - len(parts))]))
    except ValueError:
        raise UsageError(
            f"{text!r} is no group, slot or ticket; write for example guess-7, guess-7.0 or guess-7.0.2"
        ) from None


def _line(one: DeadSlot, now: float) -> str:
    age = readable_seconds(max(0.0, now - one.time))
    retried = f", retried as {one.retried_as}" if one.retried_as else ""
    why = f"{one.cause}: {one.message}" if one.message else one.cause
    return f"{one.ticket:<24} {one.pool:<12} {one.outcome:<8} {age:>10} ago  {' '.join(why.split())[:160]}{retried}"


def _lines(offer: OfferSeen) -> list[str]:
    lines = [f"ticket {offer.ticket}"]
    lines += [f"  claimed {_when(claim.time)} by {claim.worker} (attempt {claim.attempt})" for claim in offer.claims]
    if not offer.claims:
        lines.append("  never claimed")
    if offer.end is not None:
        lines.append(f"  ended {_when(offer.end_time)} as {offer.end.status} by attempt {offer.end.attempt}")
        lines += _fault(offer.end.fault.kind, offer.end.fault.message) if offer.end.fault else []
    if offer.score is not None:
        lines.append(f"  {_verdict(offer.score, _when(offer.score_time))}")
        fault = offer.score.fault
        if fault is not None and (offer.end is None or fault != offer.end.fault):
            lines += _fault(fault.kind, fault.message)
    return lines


def _verdict(score: Score, when: str) -> str:
    if score.outcome is Outcome.SCORED:
        return f"scored {when}" + ("" if score.reward is None else f", reward {score.reward:g}")
    return f"failed {when} as {score.outcome}; the slot {'is dead' if score.closes_slot else 'was offered again'}"


def _fault(kind: str, message: str) -> list[str]:
    return [f"    {kind}: {message}"]


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _as_json(offer: OfferSeen) -> dict[str, object]:
    return {
        "ticket": offer.ticket,
        "claims": [asdict(claim) for claim in offer.claims],
        "end": as_json(offer.end) | {"time": offer.end_time} if offer.end else None,
        "score": as_json(offer.score) | {"time": offer.score_time} if offer.score else None,
    }

"""`agentjet audit`: is every issued episode accounted for, exactly once?"""

from dataclasses import asdict

from agentjet.cli.output import write_json, write_line
from agentjet.cli.target import Target, find_run, open_bus
from agentjet.curriculum.audit import read_audit


async def audit(*, target: Target | None = None, json: bool = False) -> None:
    """Print the differences between issued, ended, scored, sampled and settled, with the oldest of each."""
    settings = (target or Target()).settings()
    async with open_bus(settings) as bus:
        report = await read_audit(bus, await find_run(bus, settings))
    if json:
        write_json(asdict(report))
        return
    for name, value in asdict(report).items():
        write_line(f"{name}: {value}")

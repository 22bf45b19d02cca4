"""`agentjet status`: what runs, what each part waits for, how full the streams are."""

from dataclasses import asdict

from agentjet.cli.output import write_json
from agentjet.cli.target import Target, find_run, open_bus
from agentjet.ui.status import assess, fetch


async def status(*, target: Target | None = None, json: bool = False) -> None:
    """What runs, what each part waits for and since when, and how full the streams are.

    Args:
        json: One JSON object.
    """
    settings = (target or Target()).settings()
    async with open_bus(settings) as bus:
        now = assess(await fetch(bus, await find_run(bus, settings)))
    if json:
        write_json(asdict(now))
        return
    from rich.console import Console

    from agentjet.ui.status_table import render

    Console(highlight=False, soft_wrap=True).print(render(now))

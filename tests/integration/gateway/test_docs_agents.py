"""The agents of other packages in docs/agents.md run as they are printed."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from tool_episode import TASK, tool_episode

PAGE = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()
BLOCKS = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def add(" in block]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split()[1].partition(".")[0])
async def test_a_printed_agent_plays_its_episode(nats_bus, block):
    names: dict = {"__name__": "agent"}
    exec(compile(block, "agents.md", "exec", dont_inherit=True), names)
    async with tool_episode(nats_bus) as episode:
        policy = SimpleNamespace(base_url=episode.url, api_key=episode.key, model="m")
        assert await names["run"]({"question": TASK, "answer": "10"}, policy) == 1.0
        await episode.check_sample()


def test_every_package_is_printed():
    assert len(BLOCKS) == 3

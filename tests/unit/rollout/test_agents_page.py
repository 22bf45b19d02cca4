"""docs/agents.md names everything that an agent is handed, and its example plays."""

import dataclasses
import re
import runpy
from pathlib import Path

from agentjet.rollout.policy import Policy

PAGE = (Path(__file__).parents[3] / "docs/agents.md").read_text("utf-8")
NOT_FOR_AGENTS = {"on_log"}


def test_everything_that_a_policy_offers_is_on_the_page():
    methods = {name for name in vars(Policy) if not name.startswith("_")}
    fields = {field.name for field in dataclasses.fields(Policy)}
    listed = set(re.findall(r"^\| `policy\.(\w+)", PAGE, re.MULTILINE))
    assert listed == (methods | fields) - NOT_FOR_AGENTS


def test_the_example_can_be_run(tmp_path: Path):
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    (tmp_path / "agent.py").write_text(code)
    names = runpy.run_path(str(tmp_path / "agent.py"))
    assert callable(names["run"])
    assert all({"question", "answer"} <= set(task) for task in names["tasks"]())

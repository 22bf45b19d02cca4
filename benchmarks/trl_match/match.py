"""What both sides of `vs_trl.py` are given, and what each says of an update."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentjet.cli.recipe import examples_folder
from agentjet.config.load import load
from agentjet.curriculum.dataset import load_orders

GUESSES = {"multi": 3, "single": 1}
"""Of each game."""
GROUPS, MEMBERS = 4, 8
LEARNING_RATE, TEMPERATURE, MAX_TOKENS = 1e-5, 1.0, 8
VALID = 0.8
"""Share of valid replies of a step at which the game counts as learned."""
GIVE_UP_SECONDS = 3600.0

CONFIG = """\
[run]
name = "vs-trl"
dir = "."
seed = {seed}
num_steps = {updates}

[models.policy]
path = {model}

[models.policy.learner]
learning_rate = {learning_rate}
batch_groups = {groups}

[pools.guess]
workflow = {agent}
tasks = {tasks}
group_size = {members}
deadline_seconds = 600.0
sampling = {{ temperature = {temperature}, max_tokens = {max_tokens} }}

[checkpoint]
every_steps = 0
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One update, with the figures of its batch."""

    seconds: float
    """From the first request for a reply to its end."""
    whole_seconds: float
    """From the start of the processes."""
    cpu_seconds: float
    """Processor time of all processes so far."""
    valid_ratio: float
    reward: float
    trained_tokens: float


@dataclass(frozen=True, slots=True)
class Match:
    """What both sides are given."""

    game: str
    seed: int
    updates: int
    folder: Path
    model: Path

    @property
    def agent(self) -> Path:
        """The example's file, with the game's number of guesses."""
        path = self.folder / "guess.py"
        if not path.is_file():
            text = (examples_folder() / "guess" / "agent.py").read_text("utf-8")
            line = "\nMAX_GUESSES = 3\n"
            assert text.count(line) == 1
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace(line, f"\nMAX_GUESSES = {GUESSES[self.game]}\n"), "utf-8")
        return path

    def config(self) -> Path:
        """AgentJet's configuration."""
        text = CONFIG.format(
            seed=self.seed,
            updates=self.updates,
            model=json.dumps(str(self.model)),
            agent=json.dumps(f"{self.agent}:run"),
            tasks=json.dumps(f"{self.agent}:tasks"),
            groups=GROUPS,
            members=MEMBERS,
            learning_rate=LEARNING_RATE,
            temperature=TEMPERATURE,
            max_tokens=MAX_TOKENS,
        )
        path = self.folder / "swarm.toml"
        path.write_text(text, "utf-8")
        return path

    def tasks(self) -> list[dict[str, Any]]:
        """One for each group, in AgentJet's order."""
        (order,) = load_orders(load(self.config()).settings).values()
        return [order.task(position) for position in range(GROUPS * self.updates)]

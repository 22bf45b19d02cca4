"""The example agents play through a real gateway, with a scripted model."""

import asyncio
import runpy
from pathlib import Path

import pytest
from chat_models import RUN
from live_swarm import LiveSwarm
from small_swarm import SmallSwarm

from agentjet.bus.memory import MemoryBus
from agentjet.config.settings import GatewaySettings, SwarmSettings
from agentjet.gateway import Gateway
from agentjet.rollout.dry_run import dry_run, entry_of, open_stage, task_of
from agentjet.schemas.score import Outcome

EXAMPLES = Path(__file__).parents[3] / "examples"


def settings(game: str, models: tuple[str, ...] = ("m",)) -> SwarmSettings:
    agent = EXAMPLES / game / "agent.py"
    pool = {"workflow": f"{agent}:run", "tasks": f"{agent}:tasks", "group_size": 2, "is_shuffled": False}
    model = {"path": "tiny", "learner": {"batch_groups": 4}}
    return SwarmSettings.model_validate({"models": dict.fromkeys(models, model), "pools": {"p": pool}})


async def test_a_player_who_halves_the_range_finds_every_secret(memory_bus: MemoryBus):
    def halve(prompt: str) -> str:
        low, high, guess = 1, 7, 4
        for line in prompt.splitlines():
            if line.startswith("higher"):
                low = guess + 1
            elif line.startswith("lower"):
                high = guess - 1
            guess = (low + high) // 2
        return str(guess)

    async with LiveSwarm(memory_bus, settings("guess"), halve).running(plays=True) as swarm:
        scores = await swarm.scores(6)
    assert [score.reward for score in scores] == [1.0] * 6
    assert {score.metrics["win_ratio"] for score in scores} == {1.0}
    assert all(len(score.calls["m"]) == score.metrics["num_guesses"] for score in scores)


async def test_a_player_who_only_talks_gets_nothing_and_is_scored(memory_bus: MemoryBus):
    async with LiveSwarm(memory_bus, settings("guess"), "I would like to think").running(plays=True) as swarm:
        scores = await swarm.scores(2)
    assert [(score.outcome, score.reward) for score in scores] == [(Outcome.SCORED, 0.0)] * 2
    assert scores[0].metrics["num_guesses"] == 3


async def test_an_agent_that_always_raises_is_named_with_its_line(memory_bus: MemoryBus, tmp_path: Path):
    code = "def tasks():\n    return [{}]\n\nasync def run(task, policy):\n    raise ValueError('boom')\n"
    agent = tmp_path / "agent.py"
    agent.write_text(code)
    pool = {"workflow": f"{agent}:run", "tasks": f"{agent}:tasks", "group_size": 2}
    model = {"path": "tiny", "learner": {"batch_groups": 3}}
    of = SwarmSettings.model_validate({"models": {"m": model}, "pools": {"sums": pool}})
    async with LiveSwarm(memory_bus, of, "").running(plays=True) as swarm:
        scores = await swarm.scores(8)
        async with asyncio.timeout(5):
            while not (problems := swarm.curriculum.problems()):
                await asyncio.sleep(0.01)
    assert {score.outcome for score in scores} == {Outcome.INVALID}
    assert problems == ["the last 8 episodes of pool sums failed: ValueError: boom (agent.py:5); see logs/rollout.log"]


async def test_a_dry_run_plays_without_a_run(memory_bus: MemoryBus):
    workflow = entry_of(str(EXAMPLES / "guess" / "agent.py"))
    task = task_of("", workflow)
    assert task == {"secret": 1}
    swarm = SmallSwarm(memory_bus, " 1. ")
    gateway = Gateway(memory_bus, RUN, GatewaySettings())
    async with swarm.running():
        base_url, key = await gateway.start(), await swarm.claim()
        async with open_stage(workflow) as stage:
            play = await dry_run(stage, task, base_url=base_url, api_key=key, models=("m",))
        await gateway.close()
    assert play.failure is None
    assert play.reward == pytest.approx(1.0)
    assert [line["role"] for line in play.transcript] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize(("text", "guess"), [("4", 4), (" 7.\n", 7), ("I say 3!", None), ("8", None), ("42", None)])
def test_only_a_bare_number_counts_as_a_guess(text: str, guess: int | None):
    agent = runpy.run_path(str(EXAMPLES / "guess" / "agent.py"))
    assert agent["read_guess"](text) == guess


async def test_two_models_share_a_reward(memory_bus: MemoryBus):
    live = LiveSwarm(memory_bus, settings("signal", ("m", "n")), lambda prompt: "a" if "Send" in prompt else "1")
    async with live.running(plays=True) as swarm:
        scores = await swarm.scores(6)
    # Scores come in the order in which the episodes end; every third group has state "1", the one that is named.
    wins = {int(score.ticket.group.rpartition("-")[2]) % 3: round(score.reward or 0.0, 2) for score in scores}
    assert wins == {0: 1.0, 1: 0.4, 2: 0.4}
    assert all({model: len(calls) for model, calls in score.calls.items()} == {"m": 1, "n": 1} for score in scores)

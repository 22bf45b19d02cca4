"""A judge model in episodes of another: its calls are kept, and no sample, tombstone or rank is owed for them."""

from pathlib import Path

from chat_models import RUN
from live_swarm import LiveSwarm
from whole_swarm import FoldLearner, at_least, audited, merging, records, until, working

from agentjet.bus.nats import NatsBus
from agentjet.config.settings import SwarmSettings
from agentjet.schemas.sample import Sample
from agentjet.schemas.score import Outcome
from agentjet.schemas.subject import Stream

AGENT = """
from openai import AsyncOpenAI

async def run(task, policy):
    async with AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
        async def ask(model, text):
            messages = [{"role": "user", "content": text}]
            answer = await client.chat.completions.create(model=model, messages=messages)
            return answer.choices[0].message.content
        said = await ask(policy.model, "guess") if task["plays"] else ""
        return {"reward": float(await ask("judge", "is this good: " + said) == "hi")}

def tasks():
    return [{"plays": True}, {"plays": False}]
"""


async def test_a_judge_model_is_asked_and_never_trained(nats_bus: NatsBus, tmp_path: Path):
    path = tmp_path / "agent.py"
    path.write_text(AGENT)
    pool = {"workflow": f"{path}:run", "tasks": f"{path}:tasks", "group_size": 2, "max_offers": 1, "num_epochs": 1}
    models = {"m": {"path": "tiny", "learner": {"batch_groups": 1}}, "judge": {"path": "tiny", "is_trained": False}}
    settings = SwarmSettings.model_validate({"models": models, "pools": {"p": pool | {"is_shuffled": False}}})
    live = LiveSwarm(nats_bus, settings, "hi")
    async with (
        live.running(plays=True),
        working(merging(nats_bus, RUN), FoldLearner(nats_bus, RUN, "m", settings).run()),
    ):
        report = await audited(nats_bus, RUN, 4)
        await until(at_least(nats_bus, RUN, Stream.SAMPLES, 4))
    assert (report.settled, report.trained, report.lost, report.duplicated) == (4, 2, 0, 0)
    assert report.scored_not_sampled.count == 0
    calls = await records(nats_bus, RUN, Stream.CALLS)
    assert sorted(call.model for call in calls) == ["judge"] * 4 + ["m"] * 2
    samples = await records(nats_bus, RUN, Stream.SAMPLES)
    assert {one.model for one in samples} == {"m"}
    assert sum(isinstance(one, Sample) for one in samples) == 2
    scores = await records(nats_bus, RUN, Stream.SCORES)
    played = [one for one in scores if one.ticket.group == "p-0"]
    assert all(one.reward == 1.0 and len(one.calls["judge"]) == len(one.calls["m"]) == 1 for one in played)
    silent = {(one.outcome, one.fault.kind) for one in scores if one.ticket.group == "p-1"}
    assert silent == {(Outcome.INVALID, "no_model_calls")}, "t13: a judge's answer is no move of the player"

"""`rollout --once --dry-run` and `eval`, as far as they go without a model."""

import json
from pathlib import Path

import pytest

from agentjet.cli.evaluate import score_all, summary
from agentjet.cli.main import run
from agentjet.config import PoolSettings
from agentjet.schemas.episode import EndStatus, Episode, Fault
from agentjet.schemas.ids import GroupId, RunId
from agentjet.schemas.score import Outcome
from agentjet.schemas.task import Ticket

AGENT = """
def tasks():
    return [{"secret": 4}]

async def run(task, policy):
    policy.log({"role": "user", "content": f"the secret is {task['secret']}"})
    if task["secret"] == 13:
        raise RuntimeError("bad luck")
    return {"reward": 0.5, "metrics": {"is_won": 1.0}}
"""
ENDPOINT = ("--base-url", "http://127.0.0.1:9/v1", "--model", "m")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path


def test_one_task_shows_transcript_and_reward(capsys):
    assert run(["rollout", "--once", "--dry-run", "agent.py", *ENDPOINT]) == 0
    shown = capsys.readouterr().out
    assert "user      the secret is 4" in shown
    assert "reward  0.5" in shown
    assert "metric  is_won = 1" in shown


def test_task_can_be_given_and_the_result_read_by_programs(capsys):
    words = ["rollout", "--once", "--dry-run", "agent.py:run", "--task", '{"secret": 5}', "--json", *ENDPOINT]
    assert run(words) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["task"], shown["reward"], shown["calls"]) == ({"secret": 5}, 0.5, [])


def test_agent_that_raises_is_shown_with_its_line_and_exit_code_1(capsys):
    assert run(["rollout", "--once", "--dry-run", "agent.py", "--task", '{"secret": 13}', *ENDPOINT]) == 1
    shown = capsys.readouterr().out
    assert "failed  RuntimeError: bad luck" in shown


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["agent.py"], 2, "--once --dry-run"),
        (["--once", "agent.py"], 2, "go together"),
        (["--once", "--dry-run"], 2, "go together"),
        (["--once", "--dry-run", "agent.py", "--base-url", "http://x"], 2, "needs --model"),
        (["--once", "--dry-run", "absent.py", *ENDPOINT], 1, "absent.py:run: there is no file"),
        (["--once", "--dry-run", "absent.py"], 1, "absent.py:run: there is no file"),
        (["--once", "--dry-run", "agent.py:rum", *ENDPOINT], 1, "defines no 'rum'; it has tasks, run"),
        (["--once", "--dry-run", "agent.py", "--task", "{", *ENDPOINT], 1, "the task is no JSON"),
        (["--once", "--dry-run", "agent.py", "--model", "absent"], 1, "model 'absent' is neither"),
    ],
)
def test_wrong_words_are_one_sentence(words, code, said, capsys):
    assert run(["rollout", *words]) == code
    assert said in capsys.readouterr().err


def test_eval_of_what_is_not_here_says_what_it_takes(capsys):
    words = ["--set", "eval.pool=p", "--set", "pools.p.workflow=agent.py:run", "--set", "models.m.path=tiny"]
    assert run(["eval", "SomeOrg/some-model", *words]) == 1
    said = capsys.readouterr().err
    assert "'SomeOrg/some-model' is neither a checkpoint (" in said
    assert "nor a preset (smollm2-135m, tiny), nor a folder with config.json and *.safetensors" in said


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["tiny"], 1, "no [eval] pool is configured"),
        (["tiny", "--set", "eval.pool=p", "--set", "pools.p.workflow=agent.py:run"], 2, "say with --model"),
    ],
)
def test_eval_without_a_pool_or_model_is_one_sentence(words, code, said, capsys):
    assert run(["eval", *words]) == code
    assert said in capsys.readouterr().err


def episode(reward: float | None = None, status: EndStatus = EndStatus.COMPLETED, **changes) -> Episode:
    ticket = Ticket(
        run=RunId("r-1"),
        pool="p",
        group=GroupId("p-0"),
        member=0,
        group_size=1,
        models=("m",),
        seed=0,
        deadline_seconds=1.0,
        task={"secret": 4},
    )
    return Episode(run=RunId("r-1"), ticket=ticket, attempt=1, status=status, reward=reward, **changes)


async def test_failed_episodes_are_in_no_mean():
    fault = Fault(kind="EngineError", message="gone")
    episodes = [episode(1.0, metrics={"a": 2.0}), episode(0.0), episode(status=EndStatus.FAILED, fault=fault)]
    report = summary(await score_all(episodes, PoolSettings()))
    assert (report["num_episodes"], report["num_scored"], report["reward_mean"]) == (3, 2, 0.5)
    assert report["a_mean"] == 2.0
    assert report["faults"] == ["EngineError: gone"]


async def test_nothing_scored_has_no_mean():
    assert summary(await score_all([episode()], PoolSettings()))["reward_mean"] is None


async def test_pools_reward_function_is_asked(folder):
    (folder / "judge.py").write_text("def score(task, episode):\n    return task['secret'] / 4 + episode['result']\n")
    (score,) = await score_all([episode(result=1.0)], PoolSettings(reward=f"{folder}/judge.py:score"))
    assert (score.outcome, score.reward) == (Outcome.SCORED, 2.0)


async def test_reward_function_that_raises_makes_it_invalid(folder):
    (folder / "judge.py").write_text("def score(task, episode):\n    raise KeyError('x')\n")
    (score,) = await score_all([episode()], PoolSettings(reward=f"{folder}/judge.py:score"))
    assert (score.outcome, score.reward) == (Outcome.INVALID, None)


async def test_the_repeats_of_a_task_are_judged_together_and_tasks_apart(folder):
    (folder / "judge.py").write_text(
        "def judge(task, episodes):\n"
        "    best = max(one['result'] for one in episodes)\n"
        "    return [(one['result'] == best) + 10 * one['member'] for one in episodes]\n"
    )
    played = [(1, 3.0), (1, 5.0), (2, 4.0)]
    episodes = [episode(result=result) for _, result in played]
    for place, (seed, _) in enumerate(played):
        ticket = episodes[place].ticket.model_copy(update={"seed": seed, "group": GroupId(f"p-{place}")})
        episodes[place] = episodes[place].model_copy(update={"ticket": ticket})
    fault = Fault(kind="EngineError", message="gone")
    lost = episode(status=EndStatus.FAILED, fault=fault)
    scores = await score_all([*episodes, lost], PoolSettings(group_judge=f"{folder}/judge.py:judge"))
    assert [(one.outcome, one.reward) for one in scores] == [
        (Outcome.INVALID, None),
        (Outcome.SCORED, 0.0),
        (Outcome.SCORED, 11.0),
        (Outcome.SCORED, 1.0),
    ]


async def test_a_judge_that_raises_gives_no_episode_a_reward(folder):
    (folder / "judge.py").write_text("def judge(task, episodes):\n    raise KeyError('x')\n")
    (score,) = await score_all([episode()], PoolSettings(group_judge=f"{folder}/judge.py:judge"))
    assert score.reward is None
    assert score.fault is not None and "KeyError" in score.fault.message

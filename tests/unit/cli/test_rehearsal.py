"""What `rollout --once --dry-run` plays, with a swarm.toml and without."""

from pathlib import Path

import pytest

from agentjet.cli.rehearsal import MAX_TOKENS, Rehearsal, rehearsal
from agentjet.cli.rollout import _show
from agentjet.errors import ModelNotFoundError, WorkflowError
from agentjet.rollout.stage import Play

SWARM = """
[models.small]
path = "a-model"
[models.judge]
path = "a-model"
is_trained = false
[pools.other]
workflow = "other.py:run"
[pools.sums]
workflow = "agent.py:run"
tasks = "sums.jsonl"
sampling = { temperature = 0.5, max_tokens = 8 }
[pools.plain]
workflow = "agent.py:plain"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("def tasks():\n    return [{'a': 1}]\n\ndef run(task, policy): ...\n")
    (tmp_path / "sums.jsonl").write_text('{"sum": 7}\n')
    for name in ("a-model", "another"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
        (tmp_path / name / "model.safetensors").touch()
    return tmp_path


def of(file: str = "agent.py", **changes) -> Rehearsal:
    words = {"config": None, "task": "", "model": "", "temperature": None, "max_tokens": None}
    return rehearsal(file, **(words | changes))


def test_the_agents_pool_says_models_sampling_and_task(folder: Path):
    (folder / "swarm.toml").write_text(SWARM)
    played = of()
    assert (played.names, dict(played.models)["small"].path) == (("small",), str(folder / "a-model"))
    assert set(played.models) == {"small", "judge"}, "the agent may ask a model that is served only"
    assert (played.sampling.temperature, played.sampling.max_tokens, played.task) == (0.5, 8, {"sum": 7})
    assert played.origin == f"pool sums of {folder / 'swarm.toml'}"


def test_a_look_is_quick_where_nobody_says_how_long_replies_are(folder: Path):
    (folder / "swarm.toml").write_text(SWARM)
    assert of("agent.py:plain").sampling.max_tokens == MAX_TOKENS
    assert of(model="another").sampling.max_tokens == 8


def test_words_of_the_command_come_before_the_pools(folder: Path):
    (folder / "swarm.toml").write_text(SWARM)
    played = of(model="another", temperature=0.0, max_tokens=3, task='{"b": 2}')
    assert (played.names, played.models["policy"].path) == (("policy",), str(folder / "another"))
    assert (played.sampling.temperature, played.sampling.max_tokens, played.task) == (0.0, 3, {"b": 2})
    assert of(model="judge").names == ("judge",)


def test_without_a_swarm_toml_the_files_own_tasks_and_defaults_are_taken(folder: Path):
    played = of(model=str(folder / "another"))
    assert (played.task, played.sampling.max_tokens, played.sampling.temperature) == ({"a": 1}, MAX_TOKENS, 1.0)
    assert "no pool" in played.origin


def test_what_is_missing_is_said_before_anything_is_loaded(folder: Path):
    with pytest.raises(WorkflowError, match=r"absent\.py:run: there is no file"):
        of("absent.py")
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        of(model="no-such-model")


def test_calls_are_shown_as_the_model_saw_and_said_them(folder: Path, capsys: pytest.CaptureFixture[str]):
    call = {"model": "small", "parent": 0, "prompt": "<user>\nhi", "reply": "4<end>"}
    call |= {"prompt_tokens": 3, "completion_tokens": 2, "finish_reason": "stop"}
    play = Play(1.0, {}, None, (), None, "", 0.5)
    _show(of(model="another"), play, [call, {**call, "parent": 1}], json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"model   policy ({folder / 'another'})"
    assert lines[3:7] == [
        "call 1  small: 3 prompt and 2 sampled tokens, stop",
        "  | <user>",
        "  | hi",
        "  > 4<end>",
    ]
    assert "goes on from call 1" in lines[7]
    _show(of(model="another"), play, [], json=False)
    assert "none was answered" in capsys.readouterr().out

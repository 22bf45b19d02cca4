"""What `benchmarks/vs_trl.py` compares: that TRL's side plays AgentJet's game, and how the figures are made."""

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from trl_match import agentjet_side, environment, trl_side
from trl_match.figures import Pair, summary
from trl_match.game import Game, load_agent
from trl_match.match import GROUPS, Match, Step

from agentjet.chat.history import History
from agentjet.chat.template import ChatTemplate
from agentjet.cli.recipe import examples_folder
from agentjet.pretrained.tiny_model import build_tiny
from agentjet.pretrained.tokenizer import load_tokenizer
from agentjet.rollout.policy import Policy
from agentjet.schemas.call import Call, FinishReason, Usage
from agentjet.schemas.episode import EndStatus, Episode
from agentjet.schemas.ids import CallId, RunId, group_id
from agentjet.schemas.sampling import Sampling
from agentjet.schemas.task import Ticket

AGENT = examples_folder() / "guess" / "agent.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return load_tokenizer(model)


class Script:
    """Draws prepared texts; remembers how many rows each round had."""

    def __init__(self, tokenizer: Any, *rounds: list[str]) -> None:
        self._tokenizer, self._rounds = tokenizer, list(rounds)
        self.sizes: list[int] = []

    def __call__(self, prompts: list[list[int]]) -> list[list[int]]:
        texts = self._rounds[len(self.sizes)]
        self.sizes.append(len(prompts))
        return [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]


def game(tokenizer: Any, generate: Any) -> Game:
    return Game(load_agent(AGENT), tokenizer, end_id=tokenizer.eos_token_id, generate=generate)


def test_a_round_asks_for_the_replies_of_every_episode_that_still_plays(tokenizer: Any):
    end = tokenizer.eos_token
    script = Script(tokenizer, [f"3{end}", f"5{end}", "what"], [f"4{end}", f"6{end}"], [f"1{end}"])
    episodes = game(tokenizer, script).play([{"secret": 3}, {"secret": 4}, {"secret": 7}])
    assert script.sizes == [3, 2, 1]
    assert [one.outcome["reward"] for one in episodes] == pytest.approx([1.0, 1.0, 0.2 * 2 / 3])


def test_a_round_waits_for_episodes_that_think_longer(tokenizer: Any):
    async def run(task: dict[str, Any], policy: Policy) -> dict[str, Any]:
        for _ in range(task["pauses"]):
            await asyncio.sleep(0)
        llm = agent.client.with_options(api_key=policy.api_key)
        await llm.chat.completions.create(messages=[{"role": "user", "content": "?"}])
        return {}

    agent, script = SimpleNamespace(run=run), Script(tokenizer, ["1", "2"])
    Game(agent, tokenizer, end_id=tokenizer.eos_token_id, generate=script).play([{"pauses": 0}, {"pauses": 5}])
    assert script.sizes == [2]


def test_the_mask_of_a_row_leaves_out_what_the_environment_said(tokenizer: Any):
    end = tokenizer.eos_token
    (one,) = game(tokenizer, Script(tokenizer, [f"3{end}"], ["cut off"], [f"2{end}"])).play([{"secret": 2}])
    row = list(zip(one.completion_ids, one.is_sampled, strict=True))
    assert tokenizer.decode([token for token, is_sampled in row if is_sampled]) == f"3{end}cut off2{end}"
    said = tokenizer.decode([token for token, is_sampled in row if not is_sampled])
    assert "lower" in said and "not a number" in said
    whole = tokenizer.decode(one.prompt_ids + one.completion_ids)
    assert f"3{end}" in whole and f"3{end}{end}" not in whole, "an end that was drawn is not written twice"
    assert f"cut off{end}" in whole, "an end that was not drawn is written by the template"


@st.composite
def replies(draw: st.DrawFn) -> list[tuple[str, bool]]:
    text = st.sampled_from(["1", "4", " 7.", "8", "", "I guess 4", "four\n", "é"])
    return draw(st.lists(st.tuples(text, st.booleans()), min_size=3, max_size=3))


def played(tokenizer: Any, secret: int, script: list[tuple[str, bool]]) -> tuple[Episode, list[Call]]:
    """An episode of scripted replies whose prompts AgentJet's histories make."""
    history = History(ChatTemplate(tokenizer), frozenset([tokenizer.eos_token_id]))
    agent, calls = load_agent(AGENT), []
    messages = [{"role": "system", "content": agent.RULES}, {"role": "user", "content": "Your guess?"}]
    valid, is_won = 0, False
    for text, has_ended in script:
        ids = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id] * has_ended
        ids = ids or [tokenizer.eos_token_id]
        calls.append(call(history, messages, tuple(ids), tokenizer))
        reply = calls[-1].message["content"]
        guess = agent.read_guess(reply)
        valid, is_won = valid + (guess is not None), guess == secret
        if is_won:
            break
        said = agent.answer(guess, secret)
        messages = [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": said}]
    episode = Episode(
        run=RunId("r"),
        ticket=Ticket(
            run=RunId("r"),
            pool="guess",
            group=group_id("guess", 0),
            member=0,
            group_size=1,
            models=("policy",),
            task={"secret": secret},
            seed=0,
            deadline_seconds=1.0,
        ),
        attempt=1,
        status=EndStatus.COMPLETED,
        reward=0.8 * is_won + 0.2 * (valid / len(calls)),
    )
    return episode, calls


def call(history: History, messages: list[dict[str, Any]], ids: tuple[int, ...], tokenizer: Any) -> Call:
    prompt = history.prompt(messages)
    has_ended = ids[-1] == tokenizer.eos_token_id
    made = Call(
        run=RunId("r"),
        call=CallId(f"c{len(history)}"),
        ticket="guess-0.0.0",
        attempt=1,
        model="policy",
        engine="e",
        generation="g",
        parent=prompt.parent,
        prompt_ids=prompt.increment,
        completion_ids=ids,
        logprobs=tuple(0.0 for _ in ids),
        versions=("1-0",),
        sampling=Sampling(),
        messages=tuple(messages[prompt.num_messages_before :]),
        message={"role": "assistant", "content": tokenizer.decode(list(ids), skip_special_tokens=True)},
        finish_reason=FinishReason.STOP if has_ended else FinishReason.LENGTH,
        fork=prompt.fork,
        usage=Usage(prompt_tokens=len(prompt.ids), completion_tokens=len(ids)),
    )
    history.add(made, prompt=prompt)
    return made


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(secret=st.integers(1, 7), script=replies())
def test_both_sides_show_the_model_the_same_prompts_and_give_the_same_reward(
    tokenizer: Any, secret: int, script: list[tuple[str, bool]]
):
    episode, calls = played(tokenizer, secret, script)
    agentjet_side.check_alike(episode, calls, load_agent(AGENT), tokenizer)


SCRIPT = [("3", True), ("too long", False), ("5", True)]


def test_one_other_token_in_a_prompt_is_found(tokenizer: Any):
    episode, calls = played(tokenizer, 4, SCRIPT)
    changed = calls[2].model_copy(update={"prompt_ids": (*calls[2].prompt_ids[:-1], 5)})
    with pytest.raises(AssertionError, match="other prompts"):
        agentjet_side.check_alike(episode, [*calls[:2], changed], load_agent(AGENT), tokenizer)


def test_another_reward_is_found(tokenizer: Any):
    episode, calls = played(tokenizer, 4, SCRIPT)
    other = episode.model_copy(update={"reward": 0.5})
    with pytest.raises(AssertionError, match="another reward"):
        agentjet_side.check_alike(other, calls, load_agent(AGENT), tokenizer)


def test_a_turn_that_trl_would_not_play_is_found(tokenizer: Any):
    episode, calls = played(tokenizer, 4, SCRIPT)
    agent = load_agent(AGENT)
    agent.MAX_GUESSES = 2
    with pytest.raises(AssertionError, match="other prompts"):
        agentjet_side.check_alike(episode, calls, agent, tokenizer)


def test_both_sides_get_the_same_tasks_and_the_game_its_number_of_guesses(tmp_path: Path, model: Path):
    one = Match("single", 3, updates=4, folder=tmp_path / "a", model=model)
    other = Match("multi", 4, updates=4, folder=tmp_path / "b", model=model)
    assert len(one.tasks()) == GROUPS * 4
    assert {task["secret"] for task in one.tasks()[:7]} == set(range(1, 8)), "an epoch has every secret once"
    assert one.tasks() == one.tasks() != other.tasks(), "their order follows from the seed"
    assert (load_agent(one.agent).MAX_GUESSES, load_agent(other.agent).MAX_GUESSES) == (1, 3)


def step(number: int, *, seconds: float, valid: float, cpu: float = 1.0, tokens: float = 100.0) -> Step:
    """The `number`-th of steps that take equally long, after ten seconds of start-up."""
    return Step(seconds * number, seconds * number + 10.0, 5.0 + cpu * number, valid, 0.0, tokens)


def run(seconds: float, *valid: float, cpu: float = 1.0) -> list[Step]:
    return [step(number, seconds=seconds, valid=share, cpu=cpu) for number, share in enumerate(valid, 1)]


def test_steps_are_compared_over_those_that_both_took():
    pair = Pair(trl=run(8.0, 0.1, 0.2, 0.9, cpu=6.0), agentjet=run(2.0, 0.1, 0.85, cpu=2.0))
    figures = summary([pair])
    assert figures["common_steps"] == [2]
    assert figures["seconds_per_step"] == {"trl": [8.0], "agentjet": [2.0], "ratio": 4.0}
    assert figures["cpu_seconds_per_step"] == {"trl": [6.0], "agentjet": [2.0], "ratio": 3.0}
    assert figures["trained_tokens_per_second"] == {"trl": [12.5], "agentjet": [50.0], "ratio": 4.0}
    assert figures["seconds_to_valid"] == {"trl": [24.0], "agentjet": [4.0], "ratio": 6.0}
    assert figures["whole_seconds_to_valid"] == {
        "trl": [34.0],
        "agentjet": [14.0],
        "ratio": pytest.approx(34 / 14, abs=1e-3),
    }
    assert figures["updates_to_valid"] == {"trl": [3.0], "agentjet": [2.0], "ratio": 1.5}
    assert figures["startup_seconds"] == {"trl": [10.0], "agentjet": [10.0], "ratio": 1.0}


def test_ratios_are_the_median_of_the_seeds_and_need_most_of_them():
    never, late, soon = run(1.0, 0.1, 0.1, 0.1), run(3.0, 0.1, 0.8), run(1.0, 0.8)
    two = summary([Pair(late, soon), Pair(late, soon), Pair(never, soon)])
    assert two["seconds_to_valid"]["trl"] == [6.0, 6.0, None]
    assert two["seconds_to_valid"]["ratio"] == 6.0
    one = summary([Pair(late, soon), Pair(never, soon)])
    assert one["seconds_to_valid"]["ratio"] is None


def test_a_line_of_trl_becomes_a_step():
    line = b'{"step": 1, "seconds": 3.5, "cpu_seconds": 6.0, "valid_ratio": 0.25, "reward": 0.1, "trained_tokens": 600}'
    one = trl_side.trl_step(line, launched=0.0)
    assert (one.seconds, one.cpu_seconds, one.valid_ratio, one.reward, one.trained_tokens) == (3.5, 6.0, 0.25, 0.1, 600)
    assert one.whole_seconds > 1e9, "by the clock of this process"


def test_the_processor_time_of_a_process_that_ended_still_counts():
    processor = agentjet_side.ProcessorTime()
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seen = processor.seconds()
        process.kill()
    assert processor.seconds() == seen >= 0.2


def test_an_environment_whose_installation_failed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commands: list[list[str]] = []
    is_broken = [True]

    def install(command: list[str], **_: Any) -> None:
        commands.append(command)
        Path(command[-1]).mkdir(parents=True, exist_ok=True) if "venv" in command else None
        if "pip" in command and is_broken.pop():
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setenv("AGENTJET_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", install)
    with pytest.raises(subprocess.CalledProcessError):
        environment.python()
    is_broken.append(False)
    assert environment.python() == environment.folder() / "bin" / "python"
    assert len(commands) == 4
    environment.python()
    assert len(commands) == 4, "and used from then on"


def test_another_list_of_packages_is_another_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before, changed = environment.folder(), tmp_path / "requirements.txt"
    changed.write_text("trl==0.0\n", "utf-8")
    monkeypatch.setattr(environment, "REQUIREMENTS", changed)
    assert environment.folder() != before

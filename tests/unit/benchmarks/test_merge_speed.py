"""The measurement of `benchmarks/merge_speed.py` on small episodes and a tiny model."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import merge_speed
import merge_trace
import merge_workload

from agentjet.errors import ModelNotFoundError
from agentjet.pretrained import model_file
from agentjet.pretrained.tokenizer import load_tokenizer


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch):
    torch.set_num_threads(1)
    # The measurement leaves the digest out; other tests need it.
    monkeypatch.setattr(merge_speed.trainer_module, "weights_digest", merge_speed.trainer_module.weights_digest)
    return merge_speed.make_trainer(model_file.fetch("tiny"), "float32", 1)


WORKLOADS = {
    "chain30": {"system": 20, "completion": 3, "observation": 4, "turns": 5},
    "thinkdrop30": {"system": 10, "thought": 4, "answer": 2, "observation": 3, "turns": 4},
    "group16x5turns": {"prompt": 20, "completion": 2, "observation": 3, "turns": 3, "members": 4},
    "werewolf": {"agents": 3, "rounds": 3},
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_rows_and_tree_take_the_same_step(trainer, name):
    workload = merge_workload.SHAPES[name](**WORKLOADS[name])
    found = merge_speed.measure(trainer, workload, bound=9.0, repeats=1)
    assert found["gradient_difference"] <= 5e-6
    assert ("linear" in found["seconds"]) == (name not in ("thinkdrop30", "werewolf"))
    assert found["speedup"] > 0
    assert found["peak_bytes"]["tree"] > 2**20


def test_a_linear_row_has_the_gradient_of_its_calls(trainer):
    workload = merge_workload.chain(**WORKLOADS["chain30"])
    steps = merge_speed.variants(trainer, workload, 0)
    gradients = {}
    for name in ("unmerged", "linear"):
        measured = merge_speed.Measured()
        merge_speed.run_once(trainer, steps[name], measured, keeps_gradient=True)
        gradients[name] = measured.gradient
    assert merge_speed.distance(gradients["linear"], gradients["unmerged"]) <= 5e-6


def test_a_wrong_gradient_is_noticed(trainer):
    workload = merge_workload.chain(**WORKLOADS["chain30"])
    other = merge_workload.chain(**{**WORKLOADS["chain30"], "observation": 5})
    steps = {"tree": merge_speed.variants(trainer, workload, 0)["tree"]}
    steps["rows"] = merge_speed.variants(trainer, other, 0)["unmerged"]
    gradients = []
    for step in steps.values():
        measured = merge_speed.Measured()
        merge_speed.run_once(trainer, step, measured, keeps_gradient=True)
        gradients.append(measured.gradient)
    assert merge_speed.distance(*gradients) > 1e-2


def test_the_bound_counts_operations_not_tokens(trainer):
    figures = merge_speed.arithmetic(trainer, merge_workload.chain(**WORKLOADS["chain30"]))
    assert figures["num_calls"] == 6
    assert figures["num_linear_rows"] == 2
    assert figures["flop_bound_linear"] == pytest.approx(1.0, abs=0.01)
    assert 1 < figures["flop_bound"] < figures["token_ratio"]


def test_the_command_reports_every_workload(monkeypatch, capsys):
    monkeypatch.setitem(merge_speed.SHAPES, "chain30", lambda: merge_workload.chain(**WORKLOADS["chain30"]))
    monkeypatch.setattr(merge_speed.trainer_module, "weights_digest", merge_speed.trainer_module.weights_digest)
    arguments = ["--json", "--model", "tiny", "--dtype", "float32", "--threads", "1", "--workloads", "chain30"]
    monkeypatch.setattr(sys, "argv", ["merge_speed.py", *arguments])
    merge_speed.main()
    found = json.loads(capsys.readouterr().out)["workloads"]["chain30"]
    assert found["shape"] == WORKLOADS["chain30"]
    assert found["bound_share"] == pytest.approx(found["speedup"] / found["flop_bound"], abs=2e-3)
    assert found["gradient_difference_float32"] <= 5e-6


def test_the_traces_hold_what_their_readme_says():
    encode = merge_trace.encoder(load_tokenizer("tiny"))
    tasks = {line["task_id"] for line in merge_trace._lines("tau_airline")}
    assert len(tasks) == 50
    assert len(merge_trace.swe_turns(encode)) == 13
    [trials] = merge_trace.tau(encode).groups
    assert [len(episode.turns) for episode in trials] == [7, 6, 5, 2]
    assert [episode.reward for episode in trials] == [1.0, 0.0, 1.0, 0.0]
    for episode in trials:
        for one, other in zip(episode.turns, episode.turns[1:], strict=False):
            whole = one.prompt + one.completion
            assert other.prompt[: len(whole)] == whole


def test_the_published_token_counts_are_met():
    try:
        tokenizer = load_tokenizer("smollm2-135m")
    except ModelNotFoundError:
        pytest.skip("needs the tokenizer of smollm2-135m: run `agentjet model fetch smollm2-135m`")
    found = merge_speed.counts(merge_trace.encoder(tokenizer, splits_digits=False))
    assert found["swe"] == pytest.approx(
        {"row_tokens": 61_931, "linear_tokens": 61_931, "tree_tokens": 32_348, "linear_ratio": 1.0, "tree_ratio": 1.91}
    )
    assert found["tau"] == pytest.approx(
        {
            "row_tokens": 8_576_560,
            "linear_tokens": 906_375,
            "tree_tokens": 703_512,
            "linear_ratio": 9.46,
            "tree_ratio": 12.19,
        }
    )

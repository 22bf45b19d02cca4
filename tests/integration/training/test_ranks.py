"""Two processes that share a batch take the step that one process takes alone."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

CODE = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from agentjet.config import AlgorithmSettings, LearnerSettings
from agentjet.merging import TokenTrie
from agentjet.schemas.sample import MergeReport, Sample, SampledCall
from agentjet.training.trainer import Trainer

def sample(group, member):
    prompt, reply = [group, 1, 2], [3 + member] * (1 + group + member)
    trie = TokenTrie()
    trie.insert(prompt + reply)
    return Sample(run="run-abcdef", model="m", ticket="p-0.0.0", group=f"p-{group}", member=member, rank=group,
        group_size=4, reward=float(member % 3), segments=trie.segments(),
        calls=(SampledCall(call="c", num_terms=len(reply), versions=("1-0",)),),
        term_segment=(0,) * len(reply), term_offset=tuple(range(3, 3 + len(reply))), term_logprob=(-3.0,) * len(reply),
        report=MergeReport(num_calls=1, num_branches=1, num_row_tokens=0, num_tree_tokens=0))

folder, out = sys.argv[1:]
# A large epsilon makes the first update proportional to the gradient.
smooth = {"learning_rate": 1.0, "adam_epsilon": 1.0, "max_grad_norm": 100.0}
learner = LearnerSettings(precision="float32", device="cpu", pack_tokens=12, **smooth)
for aggregation, num_minibatches in (("token_mean", 1), ("sequence_mean", 1), ("token_mean", 3)):
    learner = learner.model_copy(update={"num_minibatches": num_minibatches})
    trainer = Trainer(folder, learner, AlgorithmSettings(aggregation=aggregation), engine_dtype="float32")
    result = trainer.step([[sample(group, member) for member in range(4)] for group in range(3)])
    name = f"{aggregation}-{num_minibatches}-{trainer.accelerator.process_index}"
    trainer.engine_weights(Path(out) / f"{name}.safetensors")
    found = [result.digest, trainer.accelerator.num_processes, result.metrics]
    (Path(out) / f"{name}.json").write_text(json.dumps(found))
"""
TIMES = {"train_seconds", "tokens_per_second"}


def own(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def take_step(folder: Path, out: Path, num_ranks: int) -> None:
    out.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(folder), str(out)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **({**shared, **own(rank)} if num_ranks > 1 else {})},
        )
        for rank in range(num_ranks)
    ]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0] * num_ranks
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.slow
def test_r2_r11_two_ranks_take_the_step_of_one(tmp_path: Path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    for num_ranks in (1, 2):
        take_step(tmp_path / "model", tmp_path / str(num_ranks), num_ranks)
    for name in ("token_mean-1", "sequence_mean-1", "token_mean-3"):
        _, _, whole = json.loads((tmp_path / "1" / f"{name}-0.json").read_text())
        found = [json.loads((tmp_path / "2" / f"{name}-{rank}.json").read_text()) for rank in range(2)]
        assert found[0][0] == found[1][0]
        for _, num_processes, metrics in found:
            assert num_processes == 2
            assert drop_times(metrics) == pytest.approx(drop_times(whole), rel=1e-4, abs=1e-6)
        alone, together = (load_file(tmp_path / n / f"{name}-0.safetensors") for n in ("1", "2"))
        for key, weight in alone.items():
            torch.testing.assert_close(together[key], weight, rtol=1e-5, atol=1e-6)


def drop_times(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in TIMES}

"""Two and four processes (gloo) that share a batch take the step that one process takes alone."""

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
import json, multiprocessing, os, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from agentjet.config import AlgorithmSettings, LearnerSettings, LoraSettings
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
        term_segment=(0,) * len(reply), term_offset=tuple(range(3, 3 + len(reply))),
        term_logprob=(-3.0 - 0.02 * member,) * len(reply),
        report=MergeReport(num_calls=1, num_branches=1, num_row_tokens=0, num_tree_tokens=0))

def take_steps(folder, out, cases):
    # A large epsilon makes the first update proportional to the gradient.
    smooth = {"learning_rate": 1.0, "adam_epsilon": 1.0, "max_grad_norm": 100.0}
    for name, (num_minibatches, algorithm, lora) in cases.items():
        learner = LearnerSettings(
            precision="float32", device="cpu", pack_tokens=12, num_minibatches=num_minibatches, **smooth
        )
        trainer = Trainer(
            folder, learner, AlgorithmSettings(**algorithm), lora=LoraSettings(**lora), engine_dtype="float32"
        )
        batch = [[sample(group, member) for member in range(4)] for group in range(3)]
        # The second step's policy is no longer its reference.
        metrics = [trainer.step(batch).metrics for _ in range(2)]
        place = out / f"{name}-{trainer.accelerator.process_index}"
        trainer.engine_weights(place.with_suffix(".safetensors"))
        found = [trainer.digest, trainer.accelerator.num_processes, metrics]
        place.with_suffix(".json").write_text(json.dumps(found))

def rank(environment, *arguments):
    os.environ.update(environment)
    take_steps(*arguments)

folder, out, cases, ports = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
context = multiprocessing.get_context("fork")
for num_ranks, port in ports.items():
    place = out / num_ranks
    place.mkdir()
    shared = {"WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = []
    for number in range(int(num_ranks)):
        own = {**shared, "RANK": str(number), "LOCAL_RANK": str(number)} if int(num_ranks) > 1 else {}
        ranks.append(context.Process(target=rank, args=(own, folder, place, cases), daemon=True))
        ranks[-1].start()
    for one in ranks:
        one.join(100)
    codes = [one.exitcode for one in ranks]
    assert codes == [0] * int(num_ranks), codes
"""
CASES: dict[str, tuple[int, dict[str, object], dict[str, object]]] = {
    "token_mean": (1, {"aggregation": "token_mean"}, {}),
    "sequence_mean": (1, {"aggregation": "sequence_mean"}, {}),
    "mini_batches": (3, {"aggregation": "token_mean"}, {}),
    "reinforce_plus_plus": (1, {"advantage": "reinforce++", "kl": "k1", "kl_coefficient": 0.1}, {}),
    "divergence_in_the_loss": (2, {"kl": "k3", "kl_coefficient": 0.1}, {}),
    "gspo": (2, {"preset": "gspo"}, {}),
    "rejection": (1, {"rejection": "geometric", "rejection_floor": 0.9, "rejection_cap": 1.03}, {}),
    "adapter": (2, {"kl": "k3", "kl_coefficient": 0.1}, {"rank": 4}),
}
"""Mini-batches, algorithm and adapter, by name."""
TIMES = {"train_seconds", "tokens_per_second"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """What 1, 2 and 4 ranks wrote, by their number."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("ranks")
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(place / "model")
    ports = {num_ranks: free_port() for num_ranks in (1, 2, 4)}
    # Every rank is forked off one process: loading torch takes longer than all the steps.
    arguments = [str(place / "model"), str(place), json.dumps(CASES), json.dumps(ports)]
    subprocess.run(
        [sys.executable, "-c", CODE, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=150
    )
    return {num_ranks: place / str(num_ranks) for num_ranks in ports}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", list(CASES))
def test_r2_r11_ranks_take_the_steps_of_one(outcomes: dict[int, Path], name: str, num_ranks: int):
    """Figures to 1e-4, weights to 1e-5 of the update; all ranks hold the same bits."""
    *_, whole = json.loads((outcomes[1] / f"{name}-0.json").read_text())
    found = [json.loads((outcomes[num_ranks] / f"{name}-{rank}.json").read_text()) for rank in range(num_ranks)]
    assert {digest for digest, _, _ in found} == {found[0][0]}
    for _, num_processes, metrics in found:
        assert num_processes == num_ranks
        for one, other in zip(metrics, whole, strict=True):
            assert drop_times(one) == pytest.approx(drop_times(other), rel=1e-4, abs=1e-6)
    alone, together = (load_file(outcomes[n] / f"{name}-0.safetensors") for n in (1, num_ranks))
    for key, weight in alone.items():
        torch.testing.assert_close(together[key], weight, rtol=1e-5, atol=1e-6)


def drop_times(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in TIMES}

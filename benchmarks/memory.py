"""A tree that is larger than memory: what one optimizer step on it takes, beside the longest of its rows.

One group whose 26 members share a prompt and go on for many turns, 33,872 unique tokens in one forest, is trained
under `learner.activation_gib`; then the longest member alone, in one graph; then next to nothing, for what weights,
gradients, optimizer and libraries take anyway. Each is the second `Trainer.step` of a process of its own, so that the
optimizer's state is there, and its peak is the largest resident size of that process. `activation_` figures are peaks
less that of next to nothing.

`python benchmarks/memory.py --json [--model smollm2-135m] [--activation-gib 4] [--members 26]`
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from typing import Any

import command
from merge_workload import Turn, Workload, group_of_chains, with_partner

from agentjet.config import AlgorithmSettings, LearnerSettings
from agentjet.pretrained import model_file
from agentjet.schemas.sample import Sample

SHAPE = {"prompt": 800, "completion": 24, "observation": 80, "turns": 13}
"""Of a member, tokens and turns."""
CASES = ("nothing", "row", "tree")
GIB = 2**30


def samples_of(case: str, members: int) -> list[list[Sample]]:
    """The batch of a case."""
    found = group_of_chains(**SHAPE, members=members).groups
    if case == "row":
        found = [with_partner(max(found[0], key=lambda episode: len(episode.turns[-1].prompt)).turns)]
    if case == "nothing":
        found = [with_partner([Turn([3] * 16, [4] * 4)])]
    return Workload(case, {}, found).samples()


def child(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """One step, and the peak of this process."""
    # Only a child pays for torch.
    from agentjet.training.trainer import Trainer

    learner = LearnerSettings.model_validate(
        {
            "learning_rate": 1e-6,
            "pack_tokens": 10**6,
            "device": "cpu",
            "num_threads": args.threads,
            "activation_gib": args.activation_gib if case == "tree" else 1000.0,
        }
    )
    algorithm = AlgorithmSettings.model_validate({"advantage": "centred", "correction": "none"})
    trainer = Trainer(model_file.fetch(args.model), learner, algorithm)
    # The optimizer's state is there from the first step on.
    trainer.step(samples_of("nothing", 1))
    metrics = trainer.step(samples_of(case, args.members)).metrics
    return {
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "tokens": int(metrics["computed_tokens"]),
        "seconds": round(metrics["train_seconds"], 1),
        "bound_share": round(metrics["bound_share"], 3),
        "grad_norm": metrics["grad_norm"],
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All cases, one after the other."""
    found: dict[str, dict[str, Any]] = {}
    for case in CASES:
        line = [sys.executable, __file__, "--case", case, "--json", "--model", args.model]
        line += ["--members", str(args.members), "--threads", str(args.threads)]
        line += ["--activation-gib", str(args.activation_gib)]
        done = subprocess.run(line, capture_output=True, text=True, check=True)
        found[case] = json.loads(done.stdout.splitlines()[-1])
    peaks = {case: figures["peak_bytes"] / GIB for case, figures in found.items()}
    return {
        "model": args.model,
        "shape": SHAPE | {"members": args.members},
        "budget_gib": args.activation_gib,
        **{f"{case}_peak_gib": round(peak, 2) for case, peak in peaks.items()},
        "tree_activation_gib": round(peaks["tree"] - peaks["nothing"], 2),
        "row_activation_gib": round(peaks["row"] - peaks["nothing"], 2),
        "is_within_budget": peaks["tree"] - peaks["nothing"] <= args.activation_gib,
        "tree_tokens": found["tree"]["tokens"],
        "row_tokens": found["row"]["tokens"],
        "peak_tree_over_row": round(peaks["tree"] / peaks["row"], 2),
        "tokens_tree_over_row": round(found["tree"]["tokens"] / found["row"]["tokens"], 1),
        **{f"{case}_seconds": found[case]["seconds"] for case in ("row", "tree")},
        "bound_share": found["tree"]["bound_share"],
        **command.machine(),
    }


def main() -> None:
    parser = command.arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--activation-gib", type=float, default=4.0)
    parser.add_argument("--members", type=int, default=26)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--case", choices=CASES, help="one case in this process")
    args = parser.parse_args()
    command.show(child(args.case, args) if args.case else measure(args), as_json=args.json)


if __name__ == "__main__":
    main()

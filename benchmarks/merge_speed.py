"""How much merging saves: the same optimizer step on rows and on a token tree, beside the bound that arithmetic sets.

For each workload (`merge_workload.py`, `merge_trace.py`) a step (forward, loss, backward, clipping, AdamW) is timed on
unmerged rows (in padded batches or one after the other, whichever a trial on every sixth row finds faster), on linear
merging (calls that continue an earlier one joined to it), and on AgentJet's tree by `Trainer.step`. One process, one
model, one optimizer, same dtype and threads, in turn; medians. The digest that a learner takes of its weights after a
step is left out of all. On a busy machine the processor time (`cpu_`) says more than the clock.

The bound is the ratio of floating-point operations (`agentjet.merging.flop`): exact attended pairs and scored targets,
no padding. Gradients are compared at the whole workload: in the dtype that was timed, and in float32 through the
model's first two layers.

`python benchmarks/merge_speed.py --json [--workloads tau,chain30] [--model smollm2-135m] [--dtype auto] [--repeats 1]
[--threads N]`; `--counts` prints the token counts of the whole traces instead.
"""

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import merge_trace
import psutil
import torch
import transformers
from merge_rows import Row, RowStep, linear_rows, micro_batches, unmerged_rows
from merge_workload import SHAPES, Episode, Turn, Workload, with_partner
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentjet.config import AlgorithmSettings, LearnerSettings
from agentjet.merging import TokenTrie, plant
from agentjet.merging.flop import ModelShape, flop_ratio, forest_workload, row_workload, step_flops, unmerged_workload
from agentjet.pretrained import model_file
from agentjet.schemas.sample import Sample
from agentjet.training import trainer as trainer_module
from agentjet.training.attention import IMPLEMENTATION
from agentjet.training.optimizer import Optimizer
from agentjet.training.trainer import Trainer

PACK_TOKENS = 8192
"""Unique tokens that the tree computes together."""
ACTIVATION_GIB = 12.5
"""The tree's memory for the backward pass: enough that none of the workloads is walked with a second forward pass."""
ROW_TOKENS = 2048
"""Most tokens, padding included, of the baseline's batches."""
BUDGETS = {"padded": ROW_TOKENS, "one_by_one": 0}
TRIED_SHARE = 6
"""Every sixth row is trained both ways to find the faster one."""
CHECKED_LAYERS = 2
"""Layers of the model through which float32 gradients are compared."""
NAMES = ("tau", "swe", *SHAPES)
Step = Callable[[], object]
"""Runs one optimizer step."""


class TappedOptimizer(Optimizer):
    """Keeps the gradients of the last update, as they were before clipping."""

    gradient: list[Tensor] | None = None
    is_tapped = False

    def update(self) -> float | None:
        if self.is_tapped:
            self.gradient = [torch.zeros_like(w) if w.grad is None else w.grad.clone() for w in self.weights]
        return super().update()


@dataclass(slots=True)
class Measured:
    """What the steps of one variant showed."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """Processor time of all threads."""
    peak_bytes: list[int] = field(default_factory=list)
    gradient: list[Tensor] = field(default_factory=list)


def make_trainer(folder: Path, dtype: str, threads: int) -> Trainer:
    """A learner whose updates are too small to move a weight, so that every step meets the same ones."""
    trainer_module.weights_digest = lambda model: "not taken"
    name = "bf16" if dtype == "bfloat16" else dtype
    learner = LearnerSettings.model_validate(
        {
            "learning_rate": 1e-12,
            "pack_tokens": PACK_TOKENS,
            "activation_gib": ACTIVATION_GIB,
            "precision": name,
            "device": "cpu",
            "num_threads": threads,
        }
    )
    algorithm = AlgorithmSettings.model_validate({"advantage": "centred", "correction": "none"})
    trainer = Trainer(folder, learner, algorithm, engine_dtype=dtype)
    trainer.optimizer = TappedOptimizer(trainer.model, learner, 0)
    return trainer


@contextmanager
def attention(trainer: Trainer, implementation: str) -> Iterator[None]:
    """The model with another attention implementation."""
    trainer.model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        trainer.model.set_attn_implementation(IMPLEMENTATION)


def row_variant(trainer: Trainer, samples: Sequence[Sequence[Sample]], rows: Sequence[Row], budget: int) -> Step:
    """A step on rows in batches of at most `budget` tokens."""
    step, batches = RowStep(trainer, samples), micro_batches([len(row.ids) for row in rows], budget)

    def run() -> None:
        with attention(trainer, "sdpa"):
            step(rows, batches)

    return run


def faster_budget(trainer: Trainer, workload: Workload) -> tuple[int, dict[str, float]]:
    """Tokens of a batch with which unmerged rows are faster, and the seconds that the trial took; 0 is row by row."""
    rows = unmerged_rows(workload.groups)[::TRIED_SHARE]
    found: dict[str, float] = {}
    for name, budget in BUDGETS.items():
        trial = Measured()
        run_once(trainer, row_variant(trainer, workload.samples(), rows, budget), trial)
        found[name] = round(trial.seconds[0], 3)
    return BUDGETS[min(found, key=lambda name: found[name])], found


def variants(trainer: Trainer, workload: Workload, budget: int) -> dict[str, Step]:
    """The ways to take the step; `linear` is left out where nothing can be joined."""
    samples = workload.samples()
    rows, joined = unmerged_rows(workload.groups), linear_rows(workload.groups)
    found: dict[str, Step] = {
        "unmerged": row_variant(trainer, samples, rows, budget),
        "tree": lambda: trainer.step(samples),
    }
    if len(joined) < len(rows):
        found["linear"] = row_variant(trainer, samples, joined, ROW_TOKENS)
    return found


def run_once(trainer: Trainer, step: Step, into: Measured, *, keeps_gradient: bool = False) -> None:
    """One step with its times and the process's peak memory."""
    optimizer: Any = trainer.optimizer
    optimizer.is_tapped = keeps_gradient
    _forget_peak()
    started, cpu_started = time.perf_counter(), time.process_time()
    step()
    into.seconds.append(time.perf_counter() - started)
    into.cpu_seconds.append(time.process_time() - cpu_started)
    into.peak_bytes.append(_peak_bytes())
    if keeps_gradient:
        into.gradient, optimizer.gradient = optimizer.gradient, None


def distance(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of the second."""
    difference = sum(float((a - b).double().square().sum()) for a, b in zip(left, right, strict=True))
    return (difference / sum(float(b.double().square().sum()) for b in right)) ** 0.5


def float32_distance(folder: Path, workload: Workload, threads: int) -> float:
    """Of the tree's gradient to that of unmerged rows, in float32 through the first layers."""
    with tempfile.TemporaryDirectory() as scratch:
        short = AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=CHECKED_LAYERS, dtype=torch.float32)
        short.save_pretrained(scratch)
        trainer = make_trainer(Path(scratch), "float32", threads)
    steps = variants(trainer, workload, ROW_TOKENS)
    found = {name: Measured() for name in ("unmerged", "tree")}
    for name, measured in found.items():
        run_once(trainer, steps[name], measured, keeps_gradient=True)
    return distance(found["tree"].gradient, found["unmerged"].gradient)


def arithmetic(trainer: Trainer, workload: Workload) -> dict[str, Any]:
    """Tokens, and the bounds that operations set."""
    shape = ModelShape.of(trainer.model.config)
    samples = [sample for group in workload.samples() for sample in group]
    forest = plant(samples)
    joined = linear_rows(workload.groups)
    rows = unmerged_workload(shape, samples, forest)
    linear = row_workload(shape, [len(row.ids) for row in joined], len(forest.term_target))
    tree = forest_workload(shape, forest)
    return {
        "num_calls": sum(len(sample.calls) for sample in samples),
        "num_linear_rows": len(joined),
        "num_scored": len(forest.term_target),
        "row_tokens": rows.num_tokens,
        "linear_tokens": linear.num_tokens,
        "tree_tokens": tree.num_tokens,
        "token_ratio": round(rows.num_tokens / tree.num_tokens, 2),
        "flop_bound": round(flop_ratio(shape, rows, tree), 2),
        "flop_bound_linear": round(flop_ratio(shape, linear, tree), 2),
        "tree_teraflops": round(step_flops(shape, tree).total / 1e12, 3),
    }


def measure(trainer: Trainer, workload: Workload, bound: float, repeats: int) -> dict[str, Any]:
    """Seconds and bytes of every variant, and how far apart the gradients of tree and rows are."""
    budget, trial = faster_budget(trainer, workload)
    steps = variants(trainer, workload, budget)
    found = {name: Measured() for name in steps}
    # The short step stands on both sides of the long one, so that a drift of the machine hurts both alike, and as often
    # as makes it no shorter than a half of it, so that one busy moment does not decide.
    around = ("tree",) * max(1, round(bound / 4))
    order = (*around, "unmerged", *around, *(name for name in steps if name == "linear"))
    for _ in range(repeats):
        for name in order:
            run_once(trainer, steps[name], found[name], keeps_gradient=name != "linear" and not found[name].seconds)
    return {
        "unmerged_rows": next(name for name, tokens in BUDGETS.items() if tokens == budget),
        "trial_seconds": trial,
        **ratios(found),
        "gradient_difference": distance(found["tree"].gradient, found["unmerged"].gradient),
    }


def ratios(found: dict[str, Measured]) -> dict[str, Any]:
    """Medians of every variant, and how many times faster the tree is; without `linear` rows stay unmerged."""
    seconds = {name: statistics.median(measured.seconds) for name, measured in found.items()}
    cpu_seconds = {name: statistics.median(measured.cpu_seconds) for name, measured in found.items()}
    linear = "linear" if "linear" in found else "unmerged"
    return {
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "cpu_seconds": {name: round(value, 3) for name, value in cpu_seconds.items()},
        "peak_bytes": {name: max(measured.peak_bytes) for name, measured in found.items()},
        "speedup": round(seconds["unmerged"] / seconds["tree"], 2),
        "cpu_speedup": round(cpu_seconds["unmerged"] / cpu_seconds["tree"], 2),
        "speedup_over_linear": round(seconds[linear] / seconds["tree"], 2),
    }


def report(workload: Workload, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Everything about one workload."""
    trainer = make_trainer(folder, args.dtype, args.threads)
    small = Workload("small", {}, [with_partner([Turn([3] * 64, [4] * 8)])])
    for step in variants(trainer, small, ROW_TOKENS).values():
        step()
    found = arithmetic(trainer, workload)
    found |= measure(trainer, workload, found["flop_bound"], args.repeats)
    del trainer
    if not args.skip_float32:
        found["gradient_difference_float32"] = float32_distance(folder, workload, args.threads)
    return {
        "workload": workload.name,
        "shape": workload.shape,
        **{name: float(f"{value:.2g}") if name.startswith("gradient") else value for name, value in found.items()},
        "bound_share": round(found["speedup"] / found["flop_bound"], 3),
        "cpu_bound_share": round(found["cpu_speedup"] / found["flop_bound"], 3),
        "aimed_share": workload.aimed_share,
        "load_average": round(os.getloadavg()[0], 1),
    }


def counts(encode: merge_trace.Encode) -> dict[str, dict[str, float]]:
    """Tokens of the whole traces; tau's trees are those of its 50 groups."""
    swe = [[Episode(1.0, merge_trace.swe_turns(encode))]]
    return {"tau": _counted(list(merge_trace.tau_groups(encode).values())), "swe": _counted(swe)}


def _counted(groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
    rows = sum(len(row.ids) for row in unmerged_rows(groups))
    linear = sum(len(row.ids) for row in linear_rows(groups))
    tree = 0
    for episodes in groups:
        trie = TokenTrie()
        tree += sum(trie.insert([*turn.prompt, *turn.completion]) for one in episodes for turn in one.turns)
    return {
        "row_tokens": rows,
        "linear_tokens": linear,
        "tree_tokens": tree,
        "linear_ratio": round(rows / linear, 2),
        "tree_ratio": round(rows / tree, 2),
    }


def _forget_peak() -> None:
    """Sets the process's peak memory to what it holds now; Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """Largest resident size since the peak was forgotten; without /proc, the present one."""
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return psutil.Process().memory_info().rss


def build(name: str, folder: Path) -> Workload:
    """A workload by name; traces are read with the model's tokenizer."""
    if name in SHAPES:
        return SHAPES[name]()
    encode = merge_trace.encoder(AutoTokenizer.from_pretrained(folder))
    return merge_trace.tau(encode) if name == "tau" else merge_trace.swe(encode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--workloads", default=",".join(NAMES), help="comma between them")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--skip-float32", action="store_true", help="no comparison of float32 gradients")
    parser.add_argument("--counts", action="store_true", help="token counts of the whole traces, nothing is trained")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of one line per figure")
    args = parser.parse_args()
    # A model that is cut to its first layers is no cause for a warning.
    transformers.logging.set_verbosity_error()
    folder = model_file.fetch(args.model)
    if args.counts:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        found: dict[str, Any] = {"model_tokenizer": counts(merge_trace.encoder(tokenizer))}
        found["digits_together"] = counts(merge_trace.encoder(tokenizer, splits_digits=False))
    else:
        settings = {"model": args.model, "dtype": args.dtype, "num_threads": args.threads, "num_repeats": args.repeats}
        limits = {"pack_tokens": PACK_TOKENS, "activation_gib": ACTIVATION_GIB, "padded_tokens": ROW_TOKENS}
        found = {**settings, **limits, "workloads": {}}
        for name in args.workloads.split(","):
            found["workloads"][name] = report(build(name, folder), folder, args)
            print(json.dumps(found["workloads"][name]), file=sys.stderr, flush=True)
    print(json.dumps(found, indent=None if args.json else 1))


if __name__ == "__main__":
    main()

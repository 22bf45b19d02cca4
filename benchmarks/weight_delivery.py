"""Weights on their way from a learner to engines: bytes, seconds, and whether they are the same bit for bit.

*Updates*: SmolLM2-135M takes optimizer steps at a constant learning rate on replies that it drew itself to a few
questions, shorter ones rewarded. After the steps of warm-up each update becomes a patch, which is applied again. Beside
the patch stand two bounds (entropies of the update, see `delivery_cost.py`) and a plain code, gaps and values by zstd.

*Engines*: four engines follow a learner over a NATS server, each with requests running. `seconds_to_first_token` runs
from the end of an optimizer step to the first token that an engine draws with the new weights; `stall_milliseconds` is
what a running request waited between two tokens across the update, less its usual wait; `engine_load_seconds` from the
record to the new weights in place. Learner, server and engines are processes of their own on one machine.

`python benchmarks/weight_delivery.py --json [--warmup 20] [--updates 10] [--engines 4] [--engine-updates 4]`
"""

import argparse
import asyncio
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
from command import arguments, machine, show
from delivery_cost import census, gaps_and_values_bytes, same_bytes
from delivery_engine import MODEL, RUN
from merge_workload import Episode, Turn, Workload
from transformers import AutoTokenizer

from agentjet.bus.nats import NatsBus
from agentjet.bus.record import put, stream_specs
from agentjet.bus.server import EmbeddedServer
from agentjet.config import AlgorithmSettings, LearnerSettings
from agentjet.delivery.patch import apply_patch, encode_patch
from agentjet.durable.file import file_digest
from agentjet.inference.engine import Generation
from agentjet.inference.transformers_engine import TransformersEngine
from agentjet.pretrained import model_file
from agentjet.pretrained.tokenizer import stop_ids
from agentjet.schemas import subject
from agentjet.schemas.ids import Version
from agentjet.schemas.ledger import LearnerStart, LearnerStep
from agentjet.schemas.sample import Sample
from agentjet.schemas.sampling import Sampling
from agentjet.schemas.subject import Stream
from agentjet.training.publisher import WeightsPublisher
from agentjet.training.trainer import Trainer

RATES = (1e-6, 1e-5)
GROUPS, MEMBERS, REPLY_TOKENS = 2, 4, 24
RUNNING = 2
"""Requests that run on each engine."""
QUESTIONS = (
    "Which animal is the fastest on land?",
    "Name a city by the sea and say why you like it.",
    "I think of a whole number from 1 to 7. Guess it.",
    "What is 17 plus 25?",
    "Write one sentence about the moon.",
    "Give me a word that rhymes with light.",
    "Explain rain to a child.",
    "How do I boil an egg?",
)
Batch = list[list[Sample]]


def make_trainer(folder: Path, rate: float, threads: int) -> Trainer:
    learner = LearnerSettings.model_validate({"learning_rate": rate, "device": "cpu", "num_threads": threads})
    algorithm = AlgorithmSettings.model_validate({"correction": "none"})
    return Trainer(folder, learner, algorithm, engine_dtype="bfloat16")


def prompts_of(folder: Path) -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]


async def drawn_batches(folder: Path, count: int, threads: int) -> list[Batch]:
    """Groups of replies that the model draws; the shorter a reply's text, the higher its reward."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    engine = TransformersEngine(folder, dtype="bfloat16", num_threads=threads)
    await engine.start()
    prompts, end_ids = prompts_of(folder), stop_ids(folder)

    async def reply(prompt: list[int], seed: int) -> Episode:
        sampling = Sampling(max_tokens=REPLY_TOKENS, temperature=1.0, seed=seed)
        draws = [draw async for draw in engine.generate(Generation(str(seed), prompt, sampling, end_ids))]
        ids = [token for draw in draws for token in draw.ids]
        return Episode(-float(len(tokenizer.decode(ids))), [Turn(prompt, ids)])

    batches: list[Batch] = []
    for step in range(count):
        chosen = [prompts[(step * GROUPS + group) % len(prompts)] for group in range(GROUPS)]
        seeds = itertools.count(step * GROUPS * MEMBERS + 1)
        replies = await asyncio.gather(*(reply(prompt, next(seeds)) for prompt in chosen for _ in range(MEMBERS)))
        groups = [list(replies[start : start + MEMBERS]) for start in range(0, len(replies), MEMBERS)]
        batches.append(Workload("drawn", {}, groups).samples())
    await engine.close()
    return batches


def measured_updates(folder: Path, rate: float, batches: list[Batch], warmup: int, threads: int) -> dict[str, Any]:
    """Every update after the warm-up as a patch."""
    trainer = make_trainer(folder, rate, threads)
    found: dict[str, list[float]] = defaultdict(list)
    is_exact = True
    with tempfile.TemporaryDirectory() as scratch:
        old, new = Path(scratch) / "old", Path(scratch) / "new"
        for step, batch in enumerate(batches):
            trainer.step(batch)
            if step + 1 < warmup:
                continue
            trainer.engine_weights(new)
            if step + 1 > warmup:
                is_exact &= _measure(old, new, found)
                print(f"{rate} step {step + 1}: 1/{found['ratio'][-1]:.0f}", file=sys.stderr, flush=True)
            new.replace(old)
    figures = {name: float(f"{statistics.median(values):.4g}") for name, values in found.items()}
    return {**figures, "least_ratio": round(min(found["ratio"]), 1), "is_bit_exact": is_exact}


def _measure(old: Path, new: Path, found: dict[str, list[float]]) -> bool:
    base, after = np.fromfile(old, np.uint8), np.fromfile(new, np.uint8)
    digests = file_digest(old)[1], file_digest(new)[1]
    started = time.perf_counter()
    patch = encode_patch(base, after, base_sha256=digests[0], sha256=digests[1])
    found["encode_seconds"].append(time.perf_counter() - started)
    counted = census(base, after)
    bits = 8 * len(after)
    found["ratio"].append(len(after) / len(patch))
    found["patch_bytes"].append(len(patch))
    found["gaps_and_values_zstd_ratio"].append(len(after) / gaps_and_values_bytes(base, after))
    found["positions_and_signs_entropy_ratio"].append(bits / counted.positions_and_signs_bits)
    found["by_exponent_entropy_ratio"].append(bits / counted.by_exponent_bits)
    found["changed_ratio"].append(counted.num_changed / counted.num_values)
    found["one_ulp_ratio"].append(counted.num_one_ulp / counted.num_changed)
    found["bits_per_change"].append(8 * len(patch) / counted.num_changed)
    started = time.perf_counter()
    apply_patch(patch, base)
    found["decode_seconds"].append(time.perf_counter() - started)
    return same_bytes([base, new])


async def served_updates(folder: Path, batches: list[Batch], args: argparse.Namespace) -> dict[str, Any]:
    """Updates to engines at work, each in a process of its own (`delivery_engine.py`)."""
    trainer = make_trainer(folder, RATES[0], args.threads)
    settings = LearnerSettings.model_validate({"weights_route": "bus"})
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        async with EmbeddedServer(place / "nats", max_store_bytes=6 * 2**30) as server:
            bus = await NatsBus.connect(server.url, name="bench")
            for spec in stream_specs(RUN, max_bytes=5 * 2**30):
                await bus.ensure_stream(spec)
            publisher = WeightsPublisher(bus, RUN, MODEL, settings, place / "learner")
            await publisher.publish(Version(1, 0), await _ledger(bus, 0), trainer)
            prompts = json.dumps(prompts_of(folder)[:RUNNING])
            command = [sys.executable, str(Path(__file__).with_name("delivery_engine.py")), server.url, str(folder)]
            engines = [
                await asyncio.create_subprocess_exec(
                    *command, str(place / "engines"), prompts, stdout=asyncio.subprocess.PIPE
                )
                for _ in range(args.engines)
            ]
            try:
                return await _updates(bus, publisher, trainer, engines, batches)
            finally:
                for engine in engines:
                    engine.terminate()
                    await engine.wait()
                await bus.close()


async def _ledger(bus: NatsBus, step: int) -> int:
    shared = {"run": RUN, "model": MODEL, "incarnation": 1, "cursor": 1}
    record = (
        LearnerStep(**shared, step=step, members=(), groups=(), digest="")
        if step
        else LearnerStart(**shared, base_step=0, config_digest="", fold_digest="")
    )
    return await put(bus, RUN, Stream.LEDGER, subject.ledger(RUN, MODEL), record)


async def _told(engine: asyncio.subprocess.Process) -> dict[str, Any]:
    """The engine's next line: its first token with a version, and what its requests waited for it."""
    assert engine.stdout is not None
    async with asyncio.timeout(240):
        return json.loads(await engine.stdout.readline())


async def _updates(
    bus: NatsBus,
    publisher: WeightsPublisher,
    trainer: Trainer,
    engines: list[asyncio.subprocess.Process],
    batches: list[Batch],
) -> dict[str, Any]:
    found: dict[str, list[float]] = defaultdict(list)
    await asyncio.gather(*map(_told, engines))
    for step, batch in enumerate(batches, 1):
        await asyncio.to_thread(trainer.step, batch)
        started = time.monotonic()
        record = await publisher.publish(Version(1, step), await _ledger(bus, step), trainer)
        found["publish_seconds"].append(time.monotonic() - started)
        found["patch_bytes"].append(record.patch_bytes)
        told = await asyncio.gather(*map(_told, engines))
        arrivals = sorted(one["first_token"] - started for one in told)
        found["seconds_to_first_token"].append(arrivals[0])
        found["seconds_to_first_token_on_every_engine"].append(arrivals[-1])
        found["engine_load_seconds"] += [one["load_seconds"] for one in told]
        found["stall_milliseconds"] += [1000 * stall for one in told for stall in one["stalls"]]
        print(f"update {step}: first tokens after {arrivals[0]:.2f} to {arrivals[-1]:.2f} s", file=sys.stderr)
    return {
        "num_engines": len(engines),
        "num_running_per_engine": RUNNING,
        "num_updates": len(batches),
        **{name: round(statistics.median(values), 3) for name, values in found.items()},
        "stall_milliseconds_max": round(max(found["stall_milliseconds"]), 1),
        "num_requests_across_an_update": len(found["stall_milliseconds"]),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    folder = model_file.fetch(args.model)
    batches = asyncio.run(drawn_batches(folder, args.warmup + args.updates, args.threads))
    found: dict[str, Any] = {"model": args.model, "num_warmup_updates": args.warmup, "num_updates": args.updates}
    for rate in RATES:
        found[f"learning_rate_{rate:g}"] = measured_updates(folder, rate, batches, args.warmup, args.threads)
        gc.collect()
    if args.engines:
        found["engines"] = asyncio.run(served_updates(folder, batches[: args.engine_updates], args))
    return {**found, "machine": machine()}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--engines", type=int, default=4, help="0: only the updates")
    parser.add_argument("--engine-updates", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    show(measure(args), as_json=args.json)


if __name__ == "__main__":
    main()

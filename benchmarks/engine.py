"""Tokens per second of the embedded engine beside Transformers' own `generate` and continuous batching.

Runs the three in turn on the same prompts (so that a busy machine hurts all alike) and prints medians as one JSON line:
`python benchmarks/engine.py --json [--requests 32] [--tokens 64] [--repeats 3] [--threads N] [--skip batching]`.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

from agentjet.inference.engine import Generation
from agentjet.inference.transformers_engine import TransformersEngine
from agentjet.pretrained import model_file
from agentjet.schemas.sampling import Sampling

Run = Callable[[list[list[int]], int], Awaitable[None]]


def engine_run(engine: TransformersEngine) -> Run:
    async def one(id: str, prompt: list[int], tokens: int) -> None:
        async for _ in engine.generate(Generation(id, prompt, Sampling(max_tokens=tokens), frozenset())):
            pass

    async def run(prompts: list[list[int]], tokens: int) -> None:
        now = time.monotonic_ns()
        await asyncio.gather(*(one(f"{now}-{index}", prompt, tokens) for index, prompt in enumerate(prompts)))

    return run


def generate_run(model: Any) -> Run:
    async def run(prompts: list[list[int]], tokens: int) -> None:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, min_new_tokens=tokens, max_new_tokens=tokens, top_k=0
        )

    return run


def batching_run(model: Any) -> Run:
    async def run(prompts: list[list[int]], tokens: int) -> None:
        config = GenerationConfig(max_new_tokens=tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
        # Left to itself it takes nearly all memory of the machine for its cache.
        blocks = ContinuousBatchingConfig(
            page_size=32, num_blocks=12 * len(prompts), max_batch_tokens=1024, use_cuda_graph=False
        )
        model.generate_batch(prompts, generation_config=config, continuous_batching_config=blocks)

    return run


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    folder = model_file.fetch(args.model)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "I think of a whole number from 1 to 7. Guess it. " * 3}]
    shared = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    prompts = [[*shared[:-1], index + 10, shared[-1]] for index in range(args.requests)]
    engine = TransformersEngine(folder, dtype="bfloat16", num_threads=args.threads)
    await engine.start()
    torch.set_num_threads(args.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    runs = {"engine": engine_run(engine), "generate": generate_run(model), "batching": batching_run(model)}
    rates: dict[str, list[float]] = {name: [] for name in runs if name not in args.skip}
    prefills: list[float] = []
    for repeat in range(args.repeats + 1):
        for name in rates:
            started = time.perf_counter()
            await runs[name](prompts, args.tokens)
            # The first round warms up.
            if repeat:
                rates[name].append(args.requests * args.tokens / (time.perf_counter() - started))
        fresh = torch.randint(20, tokenizer.vocab_size, (args.requests, 100)).tolist()
        started = time.perf_counter()
        await runs["engine"](fresh, 1)
        prefills.append(args.requests * 100 / (time.perf_counter() - started))
    await engine.close()
    return {
        "model": args.model,
        "num_requests": args.requests,
        "num_tokens": args.tokens,
        "num_threads": args.threads,
        "load_average": os.getloadavg()[0],
        **{f"{name}_tokens_per_second": round(statistics.median(values), 1) for name, values in rates.items()},
        "engine_prefill_tokens_per_second": round(statistics.median(prefills[1:]), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--skip", nargs="*", default=[], choices=["engine", "generate", "batching"])
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    args = parser.parse_args()
    result = asyncio.run(measure(args))
    print(json.dumps(result) if args.json else "\n".join(f"{key:36} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()

"""Tokens per second of the engines beside what they stand on: Transformers' own `generate` and continuous batching, and
vLLM's own server.

Runs them in turn on the same prompts (so that a busy machine hurts all alike) and prints medians as one JSON line:
`python benchmarks/engine.py --json [--requests 32] [--tokens 64] [--repeats 3] [--threads N] [--skip batching]`.

- `engine`, `vllm_engine`: our two engines, ids and log-probs, token by token.
- `serve`: vLLM's own server with the options of `vllm_engine`, asked over HTTP for the same prompts, ids and log-probs;
  each reply comes in one piece.
- `generate`, `batching`: Transformers', ids only.

Without vLLM its two are left out.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import os
import socket
import statistics
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from command import arguments, machine, show

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

from agentjet.inference.engine import Engine, Generation
from agentjet.inference.transformers_engine import TransformersEngine
from agentjet.inference.vllm_engine import VllmEngine
from agentjet.inference.vllm_options import environment, on_cpu, with_threads
from agentjet.pretrained import model_file
from agentjet.schemas.sampling import Sampling

Run = Callable[[list[list[int]], int], Awaitable[None]]
START_SECONDS = 300.0
CONTEXT, CACHE_BYTES = 2048, 1_000_000_000
REST_SECONDS = 1.5
"""vLLM's workers look for work in a loop for a second before they sleep."""


@contextlib.asynccontextmanager
async def engine_run(engine: Engine) -> AsyncIterator[Run]:
    async def one(id: str, prompt: list[int], tokens: int) -> None:
        async for _ in engine.generate(Generation(id, prompt, Sampling(max_tokens=tokens), frozenset())):
            pass

    async def run(prompts: list[list[int]], tokens: int) -> None:
        now = time.monotonic_ns()
        await asyncio.gather(*(one(f"{now}-{index}", prompt, tokens) for index, prompt in enumerate(prompts)))

    await engine.start()
    try:
        yield run
    finally:
        await engine.close()


def transformers_run(folder: Path, threads: int) -> contextlib.AbstractAsyncContextManager[Run]:
    return engine_run(TransformersEngine(folder, dtype="bfloat16", num_threads=threads))


def vllm_run(folder: Path, threads: int) -> contextlib.AbstractAsyncContextManager[Run]:
    engine = VllmEngine(
        folder,
        dtype="bfloat16",
        num_threads=threads,
        context_length=CONTEXT,
        options={"kv_cache_memory_bytes": CACHE_BYTES},
    )
    return engine_run(engine)


@contextlib.asynccontextmanager
async def serve_run(folder: Path, threads: int) -> AsyncIterator[Run]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {
        "--port": port,
        "--host": "127.0.0.1",
        "--dtype": "bfloat16",
        "--max-model-len": CONTEXT,
        "--max-num-seqs": 64,
        "--max-num-batched-tokens": 1024,
        "--kv-cache-memory-bytes": CACHE_BYTES,
        "--logprobs-mode": "processed_logprobs",
    }
    # What `vllm serve` starts; that command itself looks for a package named vllm, which the CPU build is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--enforce-eager"]
    command += [str(word) for pair in options.items() for word in pair]
    is_on_cpu = not torch.cuda.is_available()
    with environment(on_cpu() if is_on_cpu else {}, with_threads(threads) if is_on_cpu else {}):
        server = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=DEVNULL)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600, limits=limits) as client:

        async def one(prompt: list[int], tokens: int) -> None:
            body = {"model": str(folder), "prompt": prompt, "max_tokens": tokens, "temperature": 1.0}
            body |= {"ignore_eos": True, "logprobs": 0, "return_token_ids": True}
            reply = (await client.post("/v1/completions", json=body)).raise_for_status().json()
            assert len(reply["choices"][0]["token_ids"]) == tokens

        async def run(prompts: list[list[int]], tokens: int) -> None:
            await asyncio.gather(*(one(prompt, tokens) for prompt in prompts))

        try:
            await wait_until_up(server, client)
            yield run
        finally:
            with contextlib.suppress(ProcessLookupError):
                server.terminate()
            await asyncio.wait_for(server.wait(), 60)


async def wait_until_up(server: Process, client: httpx.AsyncClient) -> None:
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up and server.returncode is None:
        with contextlib.suppress(httpx.TransportError):
            if (await client.get("/health")).status_code == 200:
                return
        await asyncio.sleep(0.5)
    raise SystemExit("vLLM's server did not start; run it by hand to see why")


@contextlib.asynccontextmanager
async def generate_run(folder: Path, threads: int) -> AsyncIterator[Run]:
    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    async def run(prompts: list[list[int]], tokens: int) -> None:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, min_new_tokens=tokens, max_new_tokens=tokens, top_k=0
        )

    yield run


@contextlib.asynccontextmanager
async def batching_run(folder: Path, threads: int) -> AsyncIterator[Run]:
    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    async def run(prompts: list[list[int]], tokens: int) -> None:
        config = GenerationConfig(max_new_tokens=tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
        # Left to itself it takes nearly all memory of the machine for its cache.
        blocks = ContinuousBatchingConfig(
            page_size=32, num_blocks=12 * len(prompts), max_batch_tokens=1024, use_cuda_graph=False
        )
        model.generate_batch(prompts, generation_config=config, continuous_batching_config=blocks)

    yield run


CONTENDERS: dict[str, Callable[[Path, int], contextlib.AbstractAsyncContextManager[Run]]] = {
    "engine": transformers_run,
    "generate": generate_run,
    "batching": batching_run,
    "vllm_engine": vllm_run,
    "serve": serve_run,
}
NEED_VLLM = {"vllm_engine", "serve"}


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    folder = model_file.fetch(args.model)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "I think of a whole number from 1 to 7. Guess it. " * 3}]
    shared = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    prompts = [[*shared[:-1], index + 10, shared[-1]] for index in range(args.requests)]
    without = set(args.skip) | (NEED_VLLM if importlib.util.find_spec("vllm") is None else set())
    async with contextlib.AsyncExitStack() as stack:
        runs = {
            name: await stack.enter_async_context(contender(folder, args.threads))
            for name, contender in CONTENDERS.items()
            if name not in without
        }
        rates, prefills = await rounds(runs, prompts, tokenizer.vocab_size, args)
    rate = {name: statistics.median(values) for name, values in rates.items()}
    result: dict[str, Any] = {
        "model": args.model,
        "num_requests": args.requests,
        "num_tokens": args.tokens,
        "num_threads": args.threads,
        "num_repeats": args.repeats,
        "machine": machine(),
        **{f"{name}_tokens_per_second": round(value, 1) for name, value in rate.items()},
        **{
            f"{name}_prefill_tokens_per_second": round(statistics.median(values), 1)
            for name, values in prefills.items()
        },
    }
    for ours, theirs in (("engine", "generate"), ("engine", "batching"), ("vllm_engine", "serve")):
        if ours in rates and theirs in rates:
            pairs = [one / other for one, other in zip(rates[ours], rates[theirs], strict=True)]
            result[f"{ours}_over_{theirs}_ratio"] = round(statistics.median(pairs), 3)
    return result


async def rounds(
    runs: dict[str, Run], prompts: list[list[int]], vocab_size: int, args: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Tokens per second of each contender in each round, and of the prefill of our engines."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    prefills: dict[str, list[float]] = {name: [] for name in runs if name.endswith("engine")}
    for repeat in range(args.repeats + 1):
        for name, run in runs.items():
            seconds = await timed(run, prompts, args.tokens)
            # The first round warms up.
            if repeat:
                rates[name].append(args.requests * args.tokens / seconds)
        for name, of_engine in prefills.items():
            fresh = torch.randint(20, vocab_size, (args.requests, 100)).tolist()
            seconds = await timed(runs[name], fresh, 1)
            if repeat:
                of_engine.append(args.requests * 100 / seconds)
    return rates, prefills


async def timed(run: Run, prompts: list[list[int]], tokens: int) -> float:
    """Seconds of one round, after whoever had the turn before has come to rest."""
    await asyncio.sleep(REST_SECONDS)
    started = time.perf_counter()
    await run(prompts, tokens)
    return time.perf_counter() - started


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--skip", nargs="*", default=[], choices=list(CONTENDERS))
    args = parser.parse_args()
    result = asyncio.run(measure(args))
    show(result, as_json=args.json)


if __name__ == "__main__":
    main()

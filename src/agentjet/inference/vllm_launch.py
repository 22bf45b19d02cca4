"""Starts vLLM's processes for a model.

Invariants: what vLLM settles on is what was asked for, or nothing starts; and log-probs are those that tokens are drawn
with. It blocks for seconds and belongs in a thread.
"""

import os
import sys
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from agentjet.config import LoraSettings
from agentjet.errors import EngineError, UnsupportedArchitectureError
from agentjet.inference.adapter_layout import AdapterLayout
from agentjet.inference.engine import Tokenizer
from agentjet.inference.memory_split import LearnerNeed
from agentjet.inference.policy_model import choose_context, choose_dtype
from agentjet.inference.vllm_options import (
    check_installed,
    engine_arguments,
    environment,
    everywhere,
    on_cpu,
    with_threads,
)
from agentjet.inference.weight_file import Layout
from agentjet.pretrained import model_file

log = structlog.get_logger(__name__)

_LOGPROBS = "processed_logprobs"


@dataclass(frozen=True, slots=True)
class LaunchedModel:
    """What is known of a model that vLLM serves."""

    layout: Layout
    """What a snapshot of its weights holds."""
    adapted: AdapterLayout | None
    """What an adapter holds; None where the whole weights are trained."""
    context_length: int
    vocab_size: int
    tokenizer: Tokenizer | None
    """None where the model has none."""


def launch(
    path: str | Path,
    *,
    dtype: str,
    device: str,
    num_threads: int | None,
    max_running: int,
    cache_tokens: int,
    prefill_tokens_per_step: int,
    context_length: int | None,
    options: Mapping[str, Any],
    learner: LearnerNeed | None,
    lora: LoraSettings,
) -> tuple[Any, LaunchedModel]:
    """vLLM's `AsyncLLM`, and what is known of its model.

    The arguments are those of `VllmEngine`; whatever vLLM raises passes through.
    """
    check_installed()
    folder = model_file.resolve(path)
    config = AutoConfig.from_pretrained(folder)
    text_config = config.get_text_config()
    context_length = choose_context(context_length, _overridden(text_config, options))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layout, adapted = Layout.of(model), AdapterLayout.of(model, lora) if lora.rank else None
    with environment(everywhere()):
        on = _device(device)
        wanted = str(choose_dtype(dtype, torch.device(on))).removeprefix("torch.")
        if learner is not None and on != "cpu":
            options = _part_of_gpu(learner, layout, options)
        is_on_cpu = on == "cpu"
        with environment(on_cpu() if is_on_cpu else {}, with_threads(num_threads) if is_on_cpu else {}):
            if is_on_cpu:
                log.info(
                    "vllm_threads",
                    num_threads=os.environ["OMP_NUM_THREADS"],
                    bound_to=os.environ["VLLM_CPU_OMP_THREADS_BIND"],
                )
            arguments = engine_arguments(
                folder,
                text_config,
                dtype=wanted,
                is_on_cpu=is_on_cpu,
                max_running=max_running,
                cache_tokens=cache_tokens,
                prefill_tokens_per_step=prefill_tokens_per_step,
                context_length=context_length,
                options=options,
                lora=lora,
            )
            settled = arguments.create_engine_config()
            check_settled(settled.model_config, wanted)
            if is_on_cpu:
                check_head_size(settled.model_config.get_head_size())
            llm = _llm(settled)
    tokenizer = AutoTokenizer.from_pretrained(folder) if (folder / "tokenizer.json").is_file() else None
    context = settled.model_config.max_model_len
    return llm, LaunchedModel(layout, adapted, context, text_config.vocab_size, tokenizer)


def _overridden(text_config: Any, options: Mapping[str, Any]) -> Any:
    """A model's configuration with the fields that vLLM is told to see in it."""
    seen = copy(text_config)
    seen.max_position_embeddings = options.get("hf_overrides", {}).get(
        "max_position_embeddings", getattr(text_config, "max_position_embeddings", None)
    )
    return seen


def _device(wanted: str) -> str:
    """What the installed vLLM computes on. Raises EngineError when that is not what is wanted."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    has: str = current_platform.device_type
    if wanted not in ("auto", has):
        raise EngineError(
            f"engine.device is {wanted!r}, but the installed vLLM computes on {has!r}; install its other extra"
        )
    return has


def _part_of_gpu(learner: LearnerNeed, layout: Layout, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options, with what the learner leaves; whoever says how much vLLM may take is left to it."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if options.keys() & {"gpu_memory_utilization", "kv_cache_memory_bytes"}:
        return options
    part = learner.split(current_platform.get_device_total_memory(), layout.shapes)
    # The share is compared with the free memory at the start; the cache's size takes the place of vLLM's measuring.
    return {"gpu_memory_utilization": round(part.share, 3), "kv_cache_memory_bytes": part.cache_bytes} | dict(options)


def check_settled(model_config: Any, dtype: str) -> None:
    """Raises EngineError when vLLM would compute otherwise than it was told to."""
    has = str(model_config.dtype).removeprefix("torch.")
    if has != dtype:
        raise EngineError(f"engine.dtype asks for {dtype}, but vLLM would compute in {has}; set engine.dtype = {has!r}")
    if model_config.logprobs_mode != _LOGPROBS:
        raise EngineError(
            f"vLLM would report {model_config.logprobs_mode}, which are not those that tokens are drawn with; this "
            f"version of it has no {_LOGPROBS}"
        )


def check_head_size(head_size: int) -> None:
    """Raises UnsupportedArchitectureError where vLLM's attention on a CPU would fail, but only at the first call."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # pyright: ignore[reportMissingImports]

    sizes: list[int] = CPUAttentionBackend.get_supported_head_sizes()
    if head_size not in sizes:
        known = ", ".join(map(str, sizes))
        raise UnsupportedArchitectureError(
            f"vLLM's attention on a CPU takes heads of {known}, and this model's are of {head_size}; take another "
            'model, or engine.kind = "transformers"'
        )


def _llm(settled: Any) -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]
    from vllm.v1.executor import Executor  # pyright: ignore[reportMissingImports]

    from agentjet.inference.vllm_executor import tethered

    class QuietLLM(AsyncLLM):
        """When the interpreter ends, vLLM's own finalizer finds nothing left to call, and says so as an error."""

        def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
            if not is_ending():
                super().__del__()

    return QuietLLM(settled, tethered(Executor.get_class(settled)), log_stats=False, log_requests=False)

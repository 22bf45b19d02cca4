"""The sections of `swarm.toml`; a model's own are in `agentjet.config.model`.

Each field's docstring is also its help text. Unknown keys are errors. Paths are relative to the file's folder (see
`agentjet.config.load`). Every value can be set by an environment variable: `AGENTJET_RUN__SEED=7`.
"""

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from agentjet.config.model import ModelSettings
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

"""One `swarm.toml` for a whole swarm, checked and explained; knows no torch."""

from agentjet.config.agreement import AgreementSettings
from agentjet.config.algorithm import AlgorithmSettings
from agentjet.config.lora import LoraSettings
from agentjet.config.model import EngineSettings, LearnerSettings, ModelSettings
from agentjet.config.settings import (
    CheckpointSettings,
    EvalSettings,
    GatewaySettings,
    NatsSettings,
    PoolSettings,
    RewardSettings,
    RolloutSettings,
    RunSettings,
    StreamSettings,
    SwarmSettings,
)

__all__ = [
    "AgreementSettings",
    "AlgorithmSettings",
    "CheckpointSettings",
    "EngineSettings",
    "EvalSettings",
    "GatewaySettings",
    "LearnerSettings",
    "LoraSettings",
    "ModelSettings",
    "NatsSettings",
    "PoolSettings",
    "RewardSettings",
    "RolloutSettings",
    "RunSettings",
    "StreamSettings",
    "SwarmSettings",
]

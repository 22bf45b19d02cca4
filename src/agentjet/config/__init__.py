"""One `swarm.toml` for a whole swarm, checked and explained; knows no torch."""

from agentjet.config.settings import (
    AlgorithmSettings,
    CheckpointSettings,
    EngineSettings,
    EvalSettings,
    GatewaySettings,
    LearnerSettings,
    ModelSettings,
    NatsSettings,
    PoolSettings,
    RewardSettings,
    RolloutSettings,
    RunSettings,
    StreamSettings,
    SwarmSettings,
)

__all__ = [
    "AlgorithmSettings",
    "CheckpointSettings",
    "EngineSettings",
    "EvalSettings",
    "GatewaySettings",
    "LearnerSettings",
    "ModelSettings",
    "NatsSettings",
    "PoolSettings",
    "RewardSettings",
    "RolloutSettings",
    "RunSettings",
    "StreamSettings",
    "SwarmSettings",
]

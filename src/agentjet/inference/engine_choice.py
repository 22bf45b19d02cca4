"""The engine that a model's settings ask for."""

from agentjet.config import ModelSettings
from agentjet.inference.engine import Engine


def engine_of(of: ModelSettings) -> Engine:
    """Not started yet. What the other engine needs is not imported."""
    if of.engine.kind == "vllm":
        from agentjet.inference.vllm_engine import VllmEngine

        return VllmEngine.from_settings(of)
    from agentjet.inference.transformers_engine import TransformersEngine

    return TransformersEngine.from_settings(of)

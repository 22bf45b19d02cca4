"""The endpoint that agents already speak to, turned into questions on the bus."""

from agentjet.gateway.fault import ApiError
from agentjet.gateway.gateway import Gateway
from agentjet.gateway.session import Session

__all__ = ["ApiError", "Gateway", "Session"]

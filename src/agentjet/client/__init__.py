"""A swarm client: agents of your own, anywhere a connection to the NATS server reaches.

`SwarmClient` (async) and `SyncSwarmClient` claim tickets of a pool or open episodes for tasks of their own; what they
play trains the run's models.
"""

from agentjet.client.episode import ClientEpisode
from agentjet.client.swarm import SwarmClient
from agentjet.client.sync import SyncEpisode, SyncSwarmClient

__all__ = ["ClientEpisode", "SwarmClient", "SyncEpisode", "SyncSwarmClient"]

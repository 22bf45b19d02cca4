"""One process each, independent of one another: `python -m agentjet.actors.NAME --config swarm.toml`."""

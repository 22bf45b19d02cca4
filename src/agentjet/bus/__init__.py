"""The bus between actors: NATS JetStream, its in-memory twin, and the embedded server."""

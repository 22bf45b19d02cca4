"""The tree learner: forward over token forests, loss, optimizer step, state on disk."""

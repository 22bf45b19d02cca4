"""Advantages, losses, corrections and their weights as pure functions; import the modules by name, some load torch."""

"""Engines that generate, and the service that keeps token-exact histories."""

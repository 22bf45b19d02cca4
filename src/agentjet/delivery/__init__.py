"""Weights on their way: patches that hold what an update changed, and the local file that they bring forward."""

"""Pretrained models on this machine: presets, folders, the user's cache, and their tokenizers."""

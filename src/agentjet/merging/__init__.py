"""Timeline merging: an episode's calls as one token prefix tree, trees as forests and packs; knows no torch."""

from agentjet.merging.forest import Forest, plant
from agentjet.merging.packing import pack
from agentjet.merging.timeline import merge_episode, tombstone
from agentjet.merging.trie import TokenTrie

__all__ = ["Forest", "TokenTrie", "merge_episode", "pack", "plant", "tombstone"]

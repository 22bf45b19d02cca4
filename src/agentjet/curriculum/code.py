"""The code files of pools, watched for changes: who mends an agent should not have to wait for the next probe."""

from collections.abc import Iterator, Mapping

from agentjet.config.settings import PoolSettings
from agentjet.errors import WorkflowError
from agentjet.workers.entry import Entry, locate


class CodeWatch:
    """Looks at the agents, reward functions and judges that are files on this machine; others are left alone."""

    def __init__(self, pools: Mapping[str, PoolSettings]) -> None:
        self._entries = {pool: tuple(_entries(one)) for pool, one in pools.items()}
        self._stamps = {pool: self._stamps_of(pool) for pool in pools}

    def changed(self) -> list[str]:
        """Pools whose code is another one than at the last look."""
        now = {pool: self._stamps_of(pool) for pool in self._entries}
        found = [pool for pool, stamps in now.items() if stamps != self._stamps[pool]]
        self._stamps = now
        return found

    def _stamps_of(self, pool: str) -> tuple[tuple[int, int, int], ...]:
        return tuple(entry.stamp() for entry in self._entries[pool])


def is_file(entry: str) -> bool:
    """Whether `file.py:function` is meant, and not `module:function`."""
    return entry.rpartition(":")[0].endswith(".py")


def _entries(pool: PoolSettings) -> Iterator[Entry]:
    for text in (pool.workflow, pool.reward, pool.group_judge):
        if is_file(text):
            try:
                yield locate(text)
            except WorkflowError:
                continue  # it is on the rollouts' machines only

"""The task instances of a pool and their order.

A data set is a `.jsonl` file (one JSON object a line) or a function `file.py:name` / `module:name` that returns a
sequence of mappings. Its order is a function of seed, pool and position, so a restarted curriculum derives every task
from the position in its ledger.
"""

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentjet.config.settings import PoolSettings, SwarmSettings
from agentjet.errors import TaskDataError, WorkflowError
from agentjet.workers.entry import load as load_entry
from agentjet.workers.entry import locate

Task = dict[str, Any]


def load_tasks(source: str) -> list[Task]:
    """The tasks that `pools.NAME.tasks` names.

    Raises:
        TaskDataError: The file or function is missing or broken; the message names the line or the task.
    """
    tasks = _read_lines(Path(source)) if source.endswith(".jsonl") else _call(source)
    if not tasks:
        raise TaskDataError(f"{source}: there is no task in it; a pool needs at least one")
    return tasks


def _read_lines(path: Path) -> list[Task]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskDataError(f"{path}: can not be read: {error.strerror}; check pools.NAME.tasks") from None
    except UnicodeDecodeError as error:
        raise TaskDataError(f"{path}: is not UTF-8 text at byte {error.start}") from None
    # Only line feeds end a line of JSON Lines; `splitlines` would also cut at separators inside strings.
    lines = enumerate(text.split("\n"), 1)
    return [_parse(line, f"{path} line {number}") for number, line in lines if line.strip()]


def _parse(line: str, where: str) -> Task:
    try:
        task = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TaskDataError(f"{where}: is not JSON: {error}") from None
    return _checked(task, where)


def _checked(task: object, where: str) -> Task:
    if not isinstance(task, Mapping):
        raise TaskDataError(f"{where}: a task is a JSON object, this is {type(task).__name__}")
    try:
        return json.loads(json.dumps(dict(task), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TaskDataError(f"{where}: a task holds JSON values only: {error}") from None


def _call(source: str) -> list[Task]:
    try:
        tasks = load_entry(locate(source))()
    except WorkflowError as error:
        raise TaskDataError(str(error)) from error
    except Exception as error:
        # The boundary to the user's code: whatever it raises is shown as its own error.
        raise TaskDataError(f"{source}: raised {type(error).__name__}: {error}") from error
    if isinstance(tasks, str | Mapping) or not isinstance(tasks, Sequence):
        raise TaskDataError(f"{source}: returned {type(tasks).__name__}, not a list of tasks")
    return [_checked(task, f"{source} task {number}") for number, task in enumerate(tasks)]


class TaskOrder:
    """A data set in the order in which its tasks are issued.

    Args:
        tasks: The data set.
        seed: Decides the order of every epoch; name the pool in it.
        is_shuffled: False keeps the order of the data set.
        num_epochs: Passes over the data; 0 repeats for ever.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: str, is_shuffled: bool, num_epochs: int) -> None:
        self._tasks, self._seed, self._is_shuffled = tasks, seed, is_shuffled
        self.num_positions = len(tasks) * num_epochs if num_epochs else None
        """Positions there are; None for no end."""
        self._order_of = lru_cache(maxsize=4)(self._order)

    def __len__(self) -> int:
        """Tasks of one epoch."""
        return len(self._tasks)

    def has(self, position: int) -> bool:
        """Whether there is a task at the position."""
        return self.num_positions is None or position < self.num_positions

    def task(self, position: int) -> Task:
        """The task at a position: epoch `position // len`, place by that epoch's order."""
        epoch, place = divmod(position, len(self._tasks))
        return self._tasks[self._order_of(epoch)[place]]

    def in_file_order(self, place: int) -> Task:
        """The data set's own `place`-th task, as evaluations take them."""
        return self._tasks[place % len(self._tasks)]

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self._tasks)))
        if self._is_shuffled:
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return order


def task_seed(run_seed: int, pool: str, index: int) -> int:
    """Seed of a pool's `index`-th group: 31 bits, the same in every run with the same seed."""
    digest = hashlib.sha256(f"{run_seed}:{pool}:{index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFF_FFFF


def load_orders(settings: SwarmSettings, load: Callable[[str], list[Task]] = load_tasks) -> dict[str, TaskOrder]:
    """The data set of each pool that has one; TaskDataError as `load` raises it."""
    return {pool: _order(settings, pool, one, load(one.tasks)) for pool, one in settings.pools.items() if one.tasks}


def _order(settings: SwarmSettings, pool: str, one: PoolSettings, tasks: list[Task]) -> TaskOrder:
    seed = f"{settings.run.seed}:{pool}"
    return TaskOrder(tasks, seed=seed, is_shuffled=one.is_shuffled, num_epochs=one.num_epochs)

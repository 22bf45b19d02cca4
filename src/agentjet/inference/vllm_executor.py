"""vLLM's executors, tied to the process that started the engine.

Invariant: the engine's processes do not outlive the actor, however it dies. vLLM's workers watch its engine core, but
the core does not watch who started it; a SIGKILL there would leave it and the memory it holds behind.

This module is imported in vLLM's own processes.
"""

import multiprocessing
import os
import signal
from threading import Thread
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # pyright: ignore[reportMissingImports]
from vllm.v1.executor.uniproc_executor import UniProcExecutor  # pyright: ignore[reportMissingImports]


def tether() -> None:
    """Kills this process once its parent is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        Thread(target=_follow, args=(parent,), name="agentjet-tether", daemon=True).start()


def _follow(parent: Any) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


class TetheredMultiprocExecutor(MultiprocExecutor):
    """Workers in processes of their own."""

    def _init_executor(self) -> None:
        tether()
        super()._init_executor()


class TetheredUniProcExecutor(UniProcExecutor):
    """The only worker, in the engine core's process."""

    def _init_executor(self) -> None:
        tether()
        super()._init_executor()


def tethered(kind: type[Any]) -> type[Any]:
    """The tied form of an executor; those of other systems (Ray) end their processes themselves."""
    return {MultiprocExecutor: TetheredMultiprocExecutor, UniProcExecutor: TetheredUniProcExecutor}.get(kind, kind)

"""Entries: a function of the user's, named as `file.py:function` or `module:function`.

A file is located and hashed without running it (`locate`); `load` runs it and is called in worker processes only. Every
way to fail is a `WorkflowError` of one sentence that carries the code's own error and its line.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from agentjet.errors import WorkflowError


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a function stands: `path` of its code file, and its name in it."""

    text: str
    path: Path
    name: str
    module: str
    """Empty when the entry names a file."""

    def digest(self) -> str:
        """sha256 of the code file; WorkflowError when it can not be read."""
        try:
            return hashlib.sha256(self.path.read_bytes()).hexdigest()
        except OSError as error:
            raise WorkflowError(f"{self.text}: {self.path} can not be read: {error.strerror}") from None

    def stamp(self) -> tuple[int, int, int]:
        """Changes whenever the file does (inode, size, time of change); zeros while the file is away."""
        try:
            stat = self.path.stat()
        except OSError:
            return (0, 0, 0)
        return (stat.st_ino, stat.st_size, stat.st_mtime_ns)


def locate(text: str) -> Entry:
    """The entry's file, not yet run; WorkflowError when there is none."""
    where, separator, name = text.rpartition(":")
    if not separator or not where or not name.isidentifier():
        raise WorkflowError(f"{text!r} names no function: write file.py:function or module:function")
    if where.endswith(".py") or "/" in where or "\\" in where:
        path = Path(where).expanduser().absolute()
        if not path.is_file():
            raise WorkflowError(f"{text}: there is no file {path}; check the path (it is relative to {Path.cwd()})")
        return Entry(text, path, name, "")
    return Entry(text, _module_path(text, where), name, where)


def load(entry: Entry) -> Callable[..., Any]:
    """Runs the entry's file and returns its function, plain or async; the file's folder joins the import path."""
    module = _import_file(entry) if not entry.module else _import_module(entry)
    function = getattr(module, entry.name, None)
    if function is None:
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_"]
        raise WorkflowError(
            f"{entry.text}: {entry.path} defines no {entry.name!r}; it has {', '.join(functions) or 'no function'}"
        )
    if not callable(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise WorkflowError(f"{entry.text}: {entry.name!r} has to be a function, async or plain, and no generator")
    return function


def _module_path(text: str, module: str) -> Path:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise WorkflowError(f"{text}: the module {module} can not be found: {error}") from None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise WorkflowError(f"{text}: there is no module {module}; install it or name a file: path/to/file.py:function")
    return Path(spec.origin)


def _import_file(entry: Entry) -> ModuleType:
    sys.path.insert(0, str(entry.path.parent))
    spec = importlib.util.spec_from_file_location(entry.path.stem, entry.path)
    if spec is None or spec.loader is None:
        raise WorkflowError(f"{entry.text}: {entry.path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, as an import does: dataclasses and pickling look their module up.
    sys.modules[entry.path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise WorkflowError(_import_message(entry, error)) from error
    return module


def _import_module(entry: Entry) -> ModuleType:
    try:
        return importlib.import_module(entry.module)
    except (Exception, SystemExit) as error:
        raise WorkflowError(_import_message(entry, error)) from error


def _import_message(entry: Entry, error: BaseException) -> str:
    """`agent.py:run: importing it failed at /x/agent.py line 3: KeyError: 'a'`."""
    if isinstance(error, SyntaxError):
        where, what = f"{error.filename} line {error.lineno}", error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == str(entry.path)] or list(frames)
        where, what = f"{own[-1].filename} line {own[-1].lineno}", str(error)
    return f"{entry.text}: importing it failed at {where}: {type(error).__name__}: {what}"

"""From `swarm.toml`, the environment and `--set` to settings, and where each value came from.

Precedence, highest first: `--set`, environment (`AGENTJET_RUN__SEED=7`; `__` goes one table down), file, preset,
default.

Invariants:

- An unknown key or a wrong value never passes: it is a `ConfigError` with its place and, for a name, the nearest one.
- Paths in the file are relative to the file's folder; those of the environment and of `--set` to the working directory.
  Loaded settings hold absolute paths, so that actors started anywhere agree.
- Only variables with a `__` are settings; `AGENTJET_CACHE`, `AGENTJET_SECRET` and the like belong to others.
"""

import hashlib
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, SettingsError

from agentjet.config.algorithm import PRESETS
from agentjet.config.complaint import complaint
from agentjet.config.line import Key, key_lines, leaves, nearest_line
from agentjet.config.settings import SwarmSettings
from agentjet.errors import ConfigError

ENV_PREFIX = "AGENTJET_"
DELIMITER = "__"
DEFAULT_FILE = "swarm.toml"
_NAMED_SECTIONS = ("models", "pools")
"""Tables whose keys are names that the user chose."""
_CODE_FIELDS = {"workflow", "tasks", "reward", "group_judge"}
_PLACES = {"dir", "credentials"}


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """Settings with their history."""

    settings: SwarmSettings
    origins: Mapping[str, str]
    """Dotted key to `default`, `preset dapo`, `swarm.toml:12`, `env AGENTJET_RUN__SEED` or `--set`."""
    path: Path | None
    """The file, absolute; None when there was none."""


class _EnvironmentSettings(SwarmSettings, BaseSettings):
    """Only for `EnvSettingsSource`, which reads prefix and delimiter off a class."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_nested_delimiter=DELIMITER, extra="forbid")


class _Variables(EnvSettingsSource):
    """The environment source of pydantic-settings over given variables, named as the fields are."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        super().__init__(_EnvironmentSettings, case_sensitive=True)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return self._variables


@dataclass(frozen=True, slots=True)
class _Layer:
    """One source of values."""

    tree: dict[str, Any]
    folder: Path
    """What its relative paths start from."""
    names: Mapping[Key, str]
    """Origin of each of its keys."""

    def origin(self, key: Key) -> str:
        """Where a key of this layer was written: itself, the table around it, or the first key in it."""
        around = [self.names[key[:length]] for length in range(len(key), 0, -1) if key[:length] in self.names]
        within = [name for other, name in self.names.items() if other[: len(key)] == key]
        return (around + within)[0]


def load(
    path: Path | None,
    overrides: Mapping[str, str] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Read, check and explain a configuration.

    Args:
        path: The file; None takes `swarm.toml` of the working directory, or, without one, the other sources alone.
        overrides: Dotted key to text, as given to `--set`.
        environment: None takes that of the process.

    Raises:
        ConfigError: The file is missing or broken, a key unknown, or a value wrong; the message names the place.
    """
    file = _file_or_default(path)
    file_layer = _Layer({}, Path.cwd(), {}) if file is None else _file_layer(file)
    layers = [
        _given_layer(overrides or {}),
        _environment_layer(os.environ if environment is None else environment, file_layer.tree),
        file_layer,
    ]
    tree: dict[str, Any] = {}
    for layer in reversed(layers):
        _merge(tree, _with_absolute_paths(layer.tree, layer.folder))

    def place(key: Key) -> str | None:
        for layer in layers:
            if _has(layer.tree, key):
                return layer.origin(key)
        return place(key[:-1]) if len(key) > 1 else None

    try:
        # Not strict: variables are text, and the wire's strictness is not meant for people.
        settings = SwarmSettings.model_validate(tree, strict=False)
    except ValidationError as error:
        raise ConfigError(complaint(error, place)) from None
    base = file.parent if file else Path.cwd()
    if not settings.run.dir.is_absolute():
        folder = _clean(base / settings.run.dir)
        settings = settings.model_copy(update={"run": settings.run.model_copy(update={"dir": folder})})
    return LoadedConfig(settings, _origins(settings, layers), file)


def config_digest(settings: SwarmSettings) -> str:
    """sha256 over what a run computes; where it runs (`run.dir`, `run.id`, `[nats]`) and secrets stay out."""
    data = settings.model_dump(mode="json", exclude={"nats": True, "run": {"dir", "id"}})
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def shown_values(settings: SwarmSettings) -> dict[str, Any]:
    """Dotted key to JSON value of every setting; secrets are masked."""
    data: dict[str, Any] = settings.model_dump(mode="json")
    return {".".join(key): value for key, value in leaves(data)}


def _file_or_default(path: Path | None) -> Path | None:
    if path is not None:
        return _clean(path.expanduser().absolute())
    default = Path(DEFAULT_FILE).absolute()
    return default if default.is_file() else None


def _file_layer(file: Path) -> _Layer:
    try:
        text = file.read_text("utf-8")
        tree = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{file}: there is no such file; give the right one with --config") from None
    except OSError as error:
        raise ConfigError(f"{file} can not be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file.name} is not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file.name} is not valid TOML: {error}") from None
    lines = key_lines(text)
    names = {key: f"{file.name}:{nearest_line(lines, key) or 1}" for key in {*lines, *(key for key, _ in leaves(tree))}}
    return _Layer(tree, file.parent, names)


def _environment_layer(environment: Mapping[str, str], file_tree: Mapping[str, Any]) -> _Layer:
    named = {
        _key_of(name, file_tree): name
        for name in sorted(environment, key=_is_literal)
        if name.upper().startswith(ENV_PREFIX) and DELIMITER in name[len(ENV_PREFIX) :]
    }
    names = {key: f"env {name}" for key, name in named.items()}
    return _Layer(_variables_tree({key: environment[name] for key, name in named.items()}, names), Path.cwd(), names)


def variables(overrides: Mapping[str, str]) -> dict[str, str]:
    """Settings by dotted key as environment variables, for processes that are to see what `--set` said."""
    return {_variable(key): value for key, value in overrides.items()}


def _variable(key: str) -> str:
    name = ENV_PREFIX + key.replace(".", DELIMITER)
    return name if _is_literal(name) else name.upper()


def _is_literal(variable: str) -> bool:
    """Whether the name of a model or pool in it is meant letter by letter: its table is written in small letters."""
    return variable.startswith(tuple(f"{ENV_PREFIX}{section}{DELIMITER}" for section in _NAMED_SECTIONS))


def _key_of(variable: str, file_tree: Mapping[str, Any]) -> Key:
    """Variables know no case: a model or pool of the file keeps its own."""
    if _is_literal(variable):
        return tuple(variable[len(ENV_PREFIX) :].split(DELIMITER))
    section, *rest = variable[len(ENV_PREFIX) :].lower().split(DELIMITER)
    table = file_tree.get(section)
    if rest and section in _NAMED_SECTIONS and isinstance(table, dict):
        rest[0] = next((name for name in cast("dict[str, Any]", table) if name.lower() == rest[0]), rest[0])
    return (section, *rest)


def _given_layer(overrides: Mapping[str, str]) -> _Layer:
    values = {tuple(key.split(".")): value for key, value in overrides.items()}
    names = dict.fromkeys(values, "--set")
    return _Layer(_variables_tree(values, names), Path.cwd(), names)


def _variables_tree(values: Mapping[Key, str], names: Mapping[Key, str]) -> dict[str, Any]:
    try:
        tree = _Variables({ENV_PREFIX + DELIMITER.join(key): value for key, value in values.items()})()
    except SettingsError as error:
        raise ConfigError(f"a value given as {', '.join(sorted(set(names.values())))} is not JSON: {error}") from None
    # The source passes over sections that it does not know; they are put in so that the check refuses them.
    for key in names:
        if key[0] not in SwarmSettings.model_fields:
            tree[key[0]] = {}
    return tree


def _merge(into: dict[str, Any], tree: Mapping[str, Any]) -> None:
    for name, value in tree.items():
        present = into.get(name)
        if isinstance(present, dict) and isinstance(value, dict):
            _merge(cast("dict[str, Any]", present), cast("dict[str, Any]", value))
        else:
            into[name] = value


def _has(tree: Mapping[str, Any], key: Key) -> bool:
    for name in key:
        if not isinstance(tree, dict) or name not in tree:
            return False
        tree = tree[name]
    return True


def _with_absolute_paths(tree: Mapping[str, Any], folder: Path, parents: Key = ()) -> dict[str, Any]:
    """The layer with its paths made absolute; values that are no path stay as they are."""
    result: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            result[name] = _with_absolute_paths(cast("dict[str, Any]", value), folder, (*parents, name))
        elif isinstance(value, str) and value:
            result[name] = _absolute(value, (*parents, name), folder)
        else:
            result[name] = value
    return result


def _absolute(text: str, key: Key, folder: Path) -> str:
    section, name = key[0], key[-1]
    if section in {"run", "nats"} and name in _PLACES:
        return str(_clean(folder / Path(text).expanduser()))
    if section == "models" and name == "path":
        found = _clean(folder / Path(text).expanduser())
        return str(found) if text.startswith((".", "~")) or (found / "config.json").is_file() else text
    if section == "pools" and name in _CODE_FIELDS:
        file, colon, function = text.rpartition(":") if ":" in text else (text, "", "")
        if file.endswith((".py", ".jsonl")):
            return f"{_clean(folder / Path(file).expanduser())}{colon}{function}"
    return text


def _clean(path: Path) -> Path:
    """The path without `..`, as a shell's `cd` would take it."""
    return Path(os.path.normpath(path))


def _origins(settings: SwarmSettings, layers: list[_Layer]) -> dict[str, str]:
    origins: dict[str, str] = {}
    for key, value in leaves(settings.model_dump(mode="json")):
        layer = next((layer for layer in layers if _has(layer.tree, key)), None)
        origins[".".join(key)] = _filled_by(settings, key, value) if layer is None else layer.origin(key)
    return origins


def _filled_by(settings: SwarmSettings, key: Key, value: object) -> str:
    """Where a value comes from that was written nowhere."""
    if key[0] == "models" and key[2:3] == ("algorithm",):
        preset = settings.models[key[1]].algorithm.preset
        if PRESETS[preset].get(key[3]) == value:
            return f"preset {preset}"
    return "default"

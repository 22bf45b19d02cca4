"""Where a run keeps its files: the one place that names them.

<run.dir>/run.json         id of the run; `removed.json` once its streams were deleted
<run.dir>/server.json      address of the embedded server while it runs (0600)
<run.dir>/secret.key       signs the episodes' keys (0600)
<run.dir>/nats/            the embedded server's data
<run.dir>/weights/MODEL/   snapshots on their way to the engines; `arrived-HOST-USER/` is what came over the bus
<run.dir>/checkpoints/MODEL/VERSION/
<run.dir>/logs/ACTOR.log
"""

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from agentjet.errors import ConfigError, UserError
from agentjet.schemas.ids import RunId, new_run_id

SECRET_ENV = "AGENTJET_SECRET"
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """An embedded server that is running, or was."""

    url: str
    pid: int

    @property
    def is_alive(self) -> bool:
        """Whether its process exists."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The files of a run."""

    dir: Path

    @property
    def nats(self) -> Path:
        """Data of the embedded server."""
        return self.dir / "nats"

    @property
    def logs(self) -> Path:
        """One file an actor."""
        return self.dir / "logs"

    def weights(self, model: str) -> Path:
        """Snapshots for the engines."""
        return self.dir / "weights" / model

    def checkpoints(self, model: str) -> Path:
        """One folder a version."""
        return self.dir / "checkpoints" / model

    def run_id(self) -> RunId | None:
        """The run that lives here, or None."""
        fields = self._read("run.json")
        return None if fields is None else RunId(str(fields.get("id", "")))

    def begin(self, name: str, wanted: str = "") -> RunId:
        """The id of the run that lives here; mints one in an empty folder. `wanted` names a run to go on with."""
        known = self.run_id()
        run = RunId(wanted) if wanted else known or new_run_id(name)
        if run != known:
            self._write("run.json", {"id": run})
        return run

    def forget(self) -> None:
        """The run's streams were deleted: the folder is no run's any more, its files stay."""
        path = self.dir / "run.json"
        try:
            path.replace(self.dir / "removed.json")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise UserError(f"can not rename {path}: {error.strerror}; run as its owner") from None

    def server(self) -> ServerAddress | None:
        """The embedded server's address, or None."""
        fields = self._read("server.json")
        return None if fields is None else ServerAddress(str(fields["url"]), int(fields["pid"]))

    def announce(self, url: str, pid: int) -> None:
        """Write the embedded server's address."""
        self._write("server.json", {"url": url, "pid": pid})

    def withdraw(self) -> None:
        """The embedded server has stopped."""
        (self.dir / "server.json").unlink(missing_ok=True)

    def secret(self) -> bytes:
        """The run's signing secret: of the environment, else of the folder, where it is made when missing."""
        given = os.environ.get(SECRET_ENV)
        if given:
            return _secret_of(given, SECRET_ENV)
        path = self.dir / "secret.key"
        if not path.exists():
            self._create(path, secrets.token_bytes(_SECRET_BYTES).hex())
        try:
            return _secret_of(path.read_text().strip(), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} can not be read: {error}; run as its owner, or set {SECRET_ENV}") from None

    def _create(self, path: Path, text: str) -> None:
        """Create a private file whole; of several creators the first wins."""
        draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        self._write_private(draft, text)
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()

    def _write(self, name: str, fields: dict[str, Any]) -> None:
        draft = self.dir / f".{name}.{os.getpid()}"
        self._write_private(draft, json.dumps(fields))
        draft.replace(self.dir / name)

    def _write_private(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise UserError(f"can not write {path}: {error.strerror}; choose another run.dir") from error
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.dir / name
        try:
            fields: object = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise UserError(f"{path} can not be read: {error.strerror}; run as its owner") from None
        except ValueError:
            raise ConfigError(f"{path} is damaged; move it away") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"{path} is damaged; move it away")
        return cast("dict[str, Any]", fields)


def _secret_of(text: str, where: str) -> bytes:
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) < _SECRET_BYTES:
        raise ConfigError(
            f"{where} does not hold {2 * _SECRET_BYTES} hexadecimal digits; "
            f"`openssl rand -hex {_SECRET_BYTES}` makes them"
        )
    return secret

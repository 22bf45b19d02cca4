"""The files of a run."""

import stat
from pathlib import Path

import pytest

from agentjet.config.place import SECRET_ENV, RunPlace
from agentjet.errors import ConfigError, UserError


def test_a_folder_keeps_the_run_that_began_in_it(tmp_path: Path):
    place = RunPlace(tmp_path / "run")
    run = place.begin("guess")
    assert run.startswith("guess-")
    assert place.begin("guess") == run == place.run_id()


def test_a_wanted_run_takes_the_folder_over(tmp_path: Path):
    place = RunPlace(tmp_path)
    place.begin("guess")
    assert place.begin("guess", "other-abcdef") == "other-abcdef" == place.run_id()


def test_an_empty_folder_knows_no_run_and_no_server(tmp_path: Path):
    assert RunPlace(tmp_path).run_id() is None
    assert RunPlace(tmp_path).server() is None


def test_the_server_is_announced_privately_and_withdrawn(tmp_path: Path):
    place = RunPlace(tmp_path)
    place.announce("nats://127.0.0.1:4222", 42)
    address = place.server()
    assert address is not None and (address.url, address.pid) == ("nats://127.0.0.1:4222", 42)
    assert stat.S_IMODE((tmp_path / "server.json").stat().st_mode) == 0o600
    place.withdraw()
    assert place.server() is None


def test_the_secret_is_made_once_and_only_its_user_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(SECRET_ENV, raising=False)
    place = RunPlace(tmp_path)
    secret = place.secret()
    assert len(secret) == 32
    assert place.secret() == secret
    assert stat.S_IMODE((tmp_path / "secret.key").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secret.key"]


def test_the_environment_s_secret_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SECRET_ENV, "ab" * 32)
    assert RunPlace(tmp_path).secret() == b"\xab" * 32
    assert not (tmp_path / "secret.key").exists()


@pytest.mark.parametrize("text", ["not hex", "ab", "ab" * 31])
def test_a_secret_that_is_not_64_hexadecimal_digits_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
):
    monkeypatch.setenv(SECRET_ENV, text)
    with pytest.raises(ConfigError, match="AGENTJET_SECRET does not hold 64 hexadecimal"):
        RunPlace(tmp_path).secret()


@pytest.mark.parametrize("data", [b"", b"torn", b"\xff\xfe"])
def test_a_damaged_secret_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes):
    monkeypatch.delenv(SECRET_ENV, raising=False)
    (tmp_path / "secret.key").write_bytes(data)
    with pytest.raises(UserError, match=r"secret\.key"):
        RunPlace(tmp_path).secret()


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_damaged_file_is_named(tmp_path: Path, text: str):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.json is damaged"):
        RunPlace(tmp_path).run_id()


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another"):
        RunPlace(tmp_path / "file" / "run").begin("guess")

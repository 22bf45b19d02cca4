"""Leases on files: what a process reads is not removed, whatever becomes of its name."""

from pathlib import Path

from agentjet.delivery.file_lease import remove_unless_leased, take_lease


def test_a_file_goes_once_the_last_lease_is_released(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("weights")
    one, other = take_lease(path), take_lease(path)
    assert one is not None and other is not None
    one.release()
    remove_unless_leased(path)
    assert path.exists()
    other.release()
    remove_unless_leased(path)
    assert not path.exists()
    remove_unless_leased(path)
    assert take_lease(path) is None


def test_a_lease_stays_with_a_file_that_gets_another_name(tmp_path: Path):
    work, path = tmp_path / "work", tmp_path / "file"
    work.write_text("weights")
    lease = take_lease(work)
    assert lease is not None
    work.replace(path)
    remove_unless_leased(path)
    assert path.exists()
    lease.release()


def test_no_lease_is_had_on_a_file_that_was_removed_while_it_was_opened(tmp_path: Path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("weights")
    honest = __import__("fcntl").flock

    def late(handle: int, kind: int) -> None:
        path.unlink(missing_ok=True)
        honest(handle, kind)

    monkeypatch.setattr("fcntl.flock", late)
    assert take_lease(path) is None

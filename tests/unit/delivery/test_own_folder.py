"""A process's folder: what killed processes left beside it goes, what others hold stays."""

import subprocess
import sys
from pathlib import Path

from agentjet.delivery.own_folder import OwnFolder

HOLD = """
import sys
from pathlib import Path
from agentjet.delivery.own_folder import OwnFolder
own = OwnFolder(Path(sys.argv[1]))
(own.path / "file").write_text("mine")
print("held", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_holds_is_not(tmp_path: Path):
    (tmp_path / "of no process").mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path / "theirs")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        OwnFolder(tmp_path / "one").release()
        assert (tmp_path / "theirs" / "file").exists()
        beside = OwnFolder(tmp_path / "theirs")
        assert beside.path.name == "theirs-1"
        beside.release()
        other.kill()
        other.wait()
        OwnFolder(tmp_path / "two")
    assert {path.name for path in tmp_path.iterdir()} == {"of no process", "two"}


def test_a_folder_of_that_name_is_emptied(tmp_path: Path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "left").write_text("by the process that had this name before")
    own = OwnFolder(tmp_path / "one")
    assert [path.name for path in own.path.iterdir()] == [".lock"]
    own.release()
    assert list(tmp_path.iterdir()) == []

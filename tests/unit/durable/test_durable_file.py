from hashlib import sha256

import pytest

from agentjet.durable.file import file_digest, replacing


def test_digest_and_size_are_those_of_the_bytes(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    assert file_digest(tmp_path / "f") == (3, sha256(b"abc").hexdigest())


def test_a_file_takes_its_place_whole(tmp_path):
    (tmp_path / "f").write_bytes(b"old")
    with replacing(tmp_path / "f") as partial:
        partial.write_bytes(b"new")
        assert (tmp_path / "f").read_bytes() == b"old"
    assert (tmp_path / "f").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_writer_that_fails_leaves_the_old_file_alone(tmp_path):
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(RuntimeError), replacing(tmp_path / "f") as partial:
        partial.write_bytes(b"half")
        raise RuntimeError
    assert (tmp_path / "f").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]

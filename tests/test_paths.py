"""Which paths are remote, and files that are written whole or not at all."""

import errno
import pathlib

import pytest
from etils import epath

from tf_teaforn.paths import is_remote, write_whole


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("gs://bucket/run", True),
        (epath.Path("s3://bucket/run"), True),
        ("/runs/a", False),
        (pathlib.Path("runs"), False),
        ("a:/b", False),
    ],
)
def test_is_remote(path, expected):
    assert is_remote(path) == expected


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "file"
    write_whole(path, "einé\n")
    assert path.read_bytes() == "einé\n".encode()
    write_whole(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, "before")

    def full(descriptor):
        assert (tmp_path / "file.partial").read_text() == "after"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]

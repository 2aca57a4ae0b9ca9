"""Which paths are remote, and files that are written whole or not at all."""

import errno
import os
import pathlib

import pytest
from etils import epath

from tf_teaforn.paths import check_writable, is_remote, write_whole


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
        (aside,) = tmp_path.glob("file.*.partial")
        assert aside.read_text() == "after"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_meet(tmp_path, monkeypatch):
    path = tmp_path / "file"
    real = os.fsync

    def second(descriptor):
        monkeypatch.setattr("os.fsync", real)
        write_whole(path, "second")
        assert path.read_text() == "second"

    monkeypatch.setattr("os.fsync", second)
    write_whole(path, "first")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_symbolic_link_stays_one(tmp_path):
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    link.symlink_to("folder/target")
    for content in ("new", "replaced"):
        write_whole(link, content)
        assert link.is_symlink() and not target.is_symlink()
        assert target.read_text() == content
    assert list(target.parent.iterdir()) == [target]


def test_a_pipe_is_written_to(tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, link):
        check_writable(path)
        write_whole(path, "text\n")
        assert os.read(reader, 100) == b"text\n"
    os.close(reader)
    assert pipe.is_fifo() and link.is_symlink()
    assert {*tmp_path.iterdir()} == {pipe, link}


def test_what_cannot_be_written_is_found_without_a_change(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to("/proc/none")
    # Where root cannot make a file either.
    for path in ("/proc/none", "/proc/none/x", tmp_path / "link"):
        with pytest.raises(OSError):
            check_writable(path)
    for path in ("file", "new/folder/file"):
        check_writable(tmp_path / path)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="Permission denied"):
        check_writable(tmp_path / "pipe")
    assert {path.name for path in tmp_path.iterdir()} == {"link", "pipe"}

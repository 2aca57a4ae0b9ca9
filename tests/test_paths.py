"""Which paths are remote, and files that are written whole or not at all."""

import errno
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest
from etils import epath

from tf_teaforn.paths import check_writable, is_remote, matching, move_folder, write_whole


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("gs://bucket/run", True),
        (epath.Path("gs://bucket/run"), True),
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


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), RuntimeError()]
)
def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch, error):
    path = tmp_path / "file"
    write_whole(path, "before")

    def fail(descriptor):
        (aside,) = tmp_path.glob("file.*.partial")
        assert aside.read_text() == "after"
        raise error

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(type(error)) as caught:
        write_whole(path, "after")
    assert caught.value is error
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


@pytest.mark.parametrize("name", ["a" * 255, "漢" * 85])
def test_a_name_as_long_as_there_can_be(tmp_path, name):
    assert len(name.encode()) == 255
    write_whole(tmp_path / name, "text")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "text")]


def test_the_name_of_a_folder_is_no_pattern(tmp_path):
    for name in ("run[1]/a-b/x", "run[1]/a/x", "run[1]/y", "run1/a/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    folder = tmp_path / "run[1]"
    assert matching(folder, "y*") == [folder / "y"]
    assert matching(folder, "*/x") == [folder / "a-b" / "x", folder / "a" / "x"]
    assert matching(tmp_path, "run[1]/*/x") == [tmp_path / "run1" / "a" / "x"]
    assert matching(tmp_path / "none", "*") == []


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


@pytest.mark.parametrize(("mode", "before"), [("ab", "before\n"), ("wb", "")])
@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_what_standard_output_goes_to_is_not_replaced(tmp_path, path, mode, before):
    (tmp_path / "link").symlink_to("/dev/stdout")
    output = tmp_path / "all.txt"
    output.write_text("before\n")
    inode = output.stat().st_ino
    code = (
        "import sys; from tf_teaforn.paths import check_writable, write_whole; path = sys.argv[1]; "
        "print('first', flush=True); check_writable(path); write_whole(path, 'whole\\n')"
    )
    with output.open(mode) as file:
        command = [sys.executable, "-c", code, tmp_path / path]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        subprocess.run(command, stdout=file, check=True, env=environment)
        os.write(file.fileno(), b"last\n")
    assert output.read_text() == f"{before}first\nwhole\nlast\n"
    assert output.stat().st_ino == inode
    assert {*tmp_path.iterdir()} == {output, tmp_path / "link"}


def test_what_another_process_has_open_is_not_replaced(tmp_path):
    output = tmp_path / "all.txt"
    output.write_text("before\n")
    with output.open("ab") as file:
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file)
    path = f"/proc/{process.pid}/fd/1"
    check_writable(path)
    write_whole(path, "whole\n")
    process.communicate(b"last\n")
    assert output.read_text() == "before\nwhole\nlast\n"


def test_a_descriptor_for_reading_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("before")
    with (tmp_path / "file").open() as file, pytest.raises(OSError, match="Bad file descriptor"):
        check_writable(f"/dev/fd/{file.fileno()}")


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
def test_a_file_in_memory_is_replaced():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for content in ("old", "new"):
            write_whole(f"{folder}/file", content)
            assert pathlib.Path(folder, "file").read_text() == content


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


def test_a_link_into_nothing_cannot_be_written(tmp_path):
    link, folder = tmp_path / "link", tmp_path / "folder"
    link.symlink_to("none/target")
    reason = f"it is a link into {tmp_path}/none, and there is no such folder"
    with pytest.raises(FileNotFoundError) as caught:
        check_writable(link)
    assert caught.value.strerror == reason
    # Nor could a caller make a folder of this name.
    folder.symlink_to("nowhere")
    with pytest.raises(FileNotFoundError):
        check_writable(folder / "new" / "file")
    (tmp_path / "none").mkdir()
    check_writable(link)
    write_whole(link, "text")
    assert (tmp_path / "none" / "target").read_text() == "text"


def test_a_move_that_is_not_flushed_is_undone(tmp_path, monkeypatch):
    source, destination = epath.Path(tmp_path / "source"), epath.Path(tmp_path / "destination")
    source.mkdir()
    (source / "last").write_text("text")

    def fail(descriptor):
        assert os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path)
        assert list(tmp_path.iterdir()) == [tmp_path / "destination"]
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            move_folder(source, destination, "last")
    assert list(tmp_path.iterdir()) == [tmp_path / "source"]
    move_folder(source, destination, "last")
    assert list(tmp_path.iterdir()) == [tmp_path / "destination"]
    assert (destination / "last").read_text() == "text"

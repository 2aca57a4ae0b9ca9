"""One trainer at a time in a folder, and none that is dead."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from etils import epath

from tf_teaforn import lock
from tf_teaforn.errors import UserError

CODE = """
import sys, time
from tf_teaforn.lock import locked
with locked(sys.argv[1]):
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of tmp_path."""
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, tmp_path], stdout=subprocess.PIPE, env={**os.environ}
    )
    assert process.stdout.readline() == b"locked\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_one_is_refused_until_the_first_is_gone(tmp_path, holder):
    with pytest.raises(UserError, match=rf"is in use by another bin/train \(.*pid {holder.pid}, "):
        with lock.locked(tmp_path):
            pass
    # Whatever ends it, the lock is free.
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with lock.locked(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["train.lock"]
        with pytest.raises(UserError, match=f"pid {os.getpid()}"), lock.locked(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_of_another_command(tmp_path):
    with lock.locked(tmp_path, "sweep", "output_dir"), lock.locked(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {"sweep.lock", "train.lock"}
        with (
            pytest.raises(
                UserError,
                match=rf"^--output_dir={tmp_path} is in use by another bin/sweep \(.*pid "
                rf"{os.getpid()}, .*\)\. Wait for it, stop it, or take another --output_dir\.$",
            ),
            lock.locked(tmp_path, "sweep", "output_dir"),
        ):
            pass


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    message = (
        rf"^--model_dir={tmp_path}: its file system has no locks \(Function not implemented\)\. "
    )
    with pytest.raises(UserError, match=message), lock.locked(tmp_path):
        pass


def test_the_lock_is_freed_by_an_error(tmp_path):
    with pytest.raises(KeyError), lock.locked(tmp_path):
        raise KeyError
    with lock.locked(tmp_path):
        pass


@pytest.mark.parametrize("written", [False, True])
def test_a_new_folder_stays_if_something_was_written_to_it(tmp_path, written):
    folder = tmp_path / "new"
    with pytest.raises(UserError, match="refused"), lock.locked(folder):
        if written:
            (folder / "config.json").touch()
        raise UserError("refused")
    assert folder.exists() == written
    (tmp_path / "old").mkdir()
    with lock.locked(tmp_path / "old"):
        pass
    assert (tmp_path / "old").exists()


class TestRemote:
    """The way of file systems without locks, on a local folder."""

    @pytest.fixture
    def path(self, tmp_path, monkeypatch):
        monkeypatch.setattr(lock, "_RENEWAL", 0.02)
        monkeypatch.setattr(lock, "_PATIENCE", 0.4)
        return epath.Path(tmp_path) / "train.lock"

    def test_a_second_one_is_refused(self, path):
        with lock._remote(path, "model_dir"):
            time.sleep(0.1)
            with pytest.raises(UserError, match="is in use"), lock._remote(path, "model_dir"):
                pass
        assert not path.exists()

    def test_what_a_crash_on_another_host_has_left_is_waited_for(self, path):
        path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "token": "x"}))
        start = time.monotonic()
        with lock._remote(path, "model_dir"):
            assert time.monotonic() - start >= 0.4

    def test_what_a_crash_on_this_host_has_left_is_not(self, path, holder, monkeypatch):
        owner = lock._owner()
        holder.kill()
        holder.wait()
        path.write_text(json.dumps({**owner, "pid": holder.pid}))
        monkeypatch.setattr(lock.time, "sleep", lambda seconds: pytest.fail("waited"))
        with lock._remote(path, "model_dir"):
            pass

    @pytest.mark.parametrize("key", ["host", "boot_id", "pid_namespace"])
    @pytest.mark.parametrize("written", [True, False])
    def test_a_host_of_the_same_name_is_another(self, path, holder, monkeypatch, key, written):
        class WaitedError(Exception):
            pass

        def sleep(seconds):
            raise WaitedError

        owner = lock._owner()
        holder.kill()
        holder.wait()
        before = {**owner, "pid": holder.pid, key: "another"}
        if not written:
            # As earlier releases wrote it.
            del before[key]
        path.write_text(json.dumps(before))
        monkeypatch.setattr(lock.time, "sleep", sleep)
        with pytest.raises(WaitedError), lock._remote(path, "model_dir"):
            pass

    def test_a_lock_that_another_took_over_is_left_to_it(self, path, caplog):
        other = {"host": "elsewhere", "pid": 7, "since": "today", "token": "x"}
        deadline = time.monotonic() + 60
        with lock._remote(path, "model_dir"):
            while not caplog.records:
                assert time.monotonic() < deadline
                # A renewal may just be under way.
                path.write_text(json.dumps(other))
                time.sleep(0.1)
        assert json.loads(path.read_text()) == other
        assert [record.getMessage() for record in caplog.records] == [
            f"--model_dir={path.parent} is in use by another bin/train (host elsewhere, pid 7, "
            "since today), which took it over while this one could not renew its lock. Stop one "
            "of the two."
        ]

    @pytest.mark.parametrize("failing", ["read_text", "unlink"])
    def test_a_file_system_that_fails_leaves_the_error_of_the_run(self, path, monkeypatch, failing):
        def fail(*_, **__):
            # As TensorFlow's errors, no OSError.
            raise RuntimeError("unavailable")

        with pytest.raises(KeyError, match="of the run"), lock._remote(path, "model_dir"):
            monkeypatch.setattr(type(path), failing, fail)
            raise KeyError("of the run")

    @pytest.mark.parametrize("text", ["", "null", "[1"])
    def test_a_file_that_says_nothing_is_waited_for(self, path, text):
        path.write_text(text)
        start = time.monotonic()
        with lock._remote(path, "model_dir"):
            assert time.monotonic() - start >= 0.4

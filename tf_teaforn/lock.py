"""One trainer at a time in a model directory, one sweep or bin/prepare in its folder."""

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid

from etils import epath

from tf_teaforn.errors import UserError
from tf_teaforn.paths import is_remote

_logger = logging.getLogger(__name__)

# What must agree for a process id to mean the same process: hosts of one name may be many.
_MACHINE = ("host", "boot_id", "pid_namespace")
# Remote lock files are renewed so often, and given up by others after so many seconds without it.
_RENEWAL, _PATIENCE = 20.0, 60.0


@contextlib.contextmanager
def locked(folder, command="train", flag="model_dir"):
    """Holds `folder`'s lock inside.

    On a local disk the operating system keeps it, and frees it whenever the process ends. A remote
    file system has no locks: there a file `<command>.lock` is renewed every 20 seconds, and one
    that a crash has left behind is taken over after a minute without change. Two processes that
    start within the same moment can both get it there; one of them then logs an error, as does one
    that was suspended for so long that another took over. A folder that was not there is made, and
    goes again if nothing was written to it.

    Args:
        folder: local or remote.
        command: of which there can be one.
        flag: what names the folder.

    Raises:
        UserError: another process holds it, or the file system has no locks.
    """
    folder = epath.Path(folder)
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (_remote if is_remote(folder) else _local)(folder / f"{command}.lock", flag):
            yield
    finally:
        # Empty after a run that was refused. An object store has no folders that could stay.
        if made and not is_remote(folder):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def _owner():
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T")}
    # Linux alone has them.
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            owner["boot_id"] = file.read().strip()
        owner["pid_namespace"] = os.readlink("/proc/self/ns/pid")
    return owner


def _users(path, flag, owner):
    told = ("host", "pid", "since")
    details = ", ".join(f"{key} {owner[key]}" for key in told if key in owner)
    return f"--{flag}={path.parent} is in use by another bin/{path.stem} ({details or 'unknown'})"


def _in_use(path, flag, owner):
    return UserError(
        f"{_users(path, flag, owner)}. Wait for it, stop it, or take another --{flag}."
    )


def _read(path):
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, TypeError, ValueError):
        return {}


@contextlib.contextmanager
def _local(path, flag):
    descriptor = _acquire(path, flag)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(_owner()).encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path, flag):
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise _in_use(path, flag, _read(path)) from None
        except OSError as error:
            os.close(descriptor)
            raise UserError(
                f"--{flag}={path.parent}: its file system has no locks ({error.strerror}). Mount "
                f"it with them, or take another --{flag}."
            ) from error
        # The file may have been removed by its owner between the two calls.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)


@contextlib.contextmanager
def _remote(path, flag):
    owner = {**_owner(), "token": uuid.uuid4().hex}
    _wait_for_remote(path, flag, owner)
    done = threading.Event()

    def renew():
        written = False
        while True:
            with contextlib.suppress(Exception):
                # Before the first time it may be what a crash has left.
                now = _read(path) if written else {}
                if now.get("token", owner["token"]) != owner["token"]:
                    _logger.error(
                        "%s, which took it over while this one could not renew its lock. Stop one "
                        "of the two.",
                        _users(path, flag, now),
                    )
                    return
                path.write_text(json.dumps({**owner, "renewed": time.time()}))
                written = True
            if done.wait(_RENEWAL):
                return

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        # Those of object stores are TensorFlow's and no OSError; what ended the run counts.
        with contextlib.suppress(Exception):
            if _read(path).get("token") == owner["token"]:
                path.unlink(missing_ok=True)


def _wait_for_remote(path, flag, owner):
    """Returns when nobody has renewed the lock for a while."""
    if not path.exists():
        return
    before = _read(path)
    here = all(before.get(key) == owner.get(key) for key in _MACHINE)
    if here and not _alive(before.get("pid")):
        return
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        time.sleep(_PATIENCE / 20)
        now = _read(path)
        if now and now != before:
            raise _in_use(path, flag, now)


def _alive(pid):
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, TypeError, ValueError):
        return False
    except PermissionError:
        pass
    return True

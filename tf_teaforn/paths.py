"""Local and remote paths, and files that are whole whenever they are read."""

import contextlib
import errno
import fcntl
import glob
import os
import re
import secrets
import tempfile
from collections.abc import Iterator

from etils import epath

# What is in there leads to what a process has open; to `os.path` it may look like a link to a file.
_DESCRIPTORS = re.compile(r"/proc/[0-9]+(/task/[0-9]+)?/fd")


def is_remote(path: epath.PathLike) -> bool:
    """Whether a path is an address, such as gs://bucket/folder, and not on this machine."""
    return "://" in os.fspath(path)


def write_whole(path: epath.PathLike, content: str | bytes) -> None:
    """Writes a file aside and puts it in place in one step: readers see the old one or the new one.

    A symbolic link stays one: the file it leads to is replaced. A device, a pipe and what a process
    has open, such as /dev/stdout, are written to; what is there stays.

    Raises:
        OSError, or what TensorFlow raises of an object store: it cannot be written; what was there
            is as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    path = epath.Path(path)
    target = _in_place(path)
    if target is not None:
        # Opened again it would have a position of its own, and one would overwrite the other.
        own = isinstance(target, int)
        with open(target, "wb" if own else "ab", closefd=not own) as file:
            file.write(data)
        return
    if not is_remote(path):
        path = epath.Path(os.path.realpath(path))
    # Of its own: several processes may be writing this file. A name has 255 bytes at the most, up
    # to 4 a character.
    aside = path.with_name(f"{path.name[:50]}.{secrets.token_hex(8)}.partial")
    try:
        aside.write_bytes(data)
        # The new name must not outlive a power cut without the content.
        flush(aside)
        aside.replace(path)
    except BaseException:
        # Those of object stores are TensorFlow's and no OSError.
        with contextlib.suppress(Exception):
            aside.unlink(missing_ok=True)
        raise


def check_writable(path: epath.PathLike) -> None:
    """Tries whether `write_whole` could write a file, in its folder or the nearest that exists.

    Object stores tell by a write alone: nothing is tried there.

    Raises:
        OSError: it could not.
    """
    if is_remote(path):
        return
    target = _in_place(path)
    if isinstance(target, int):
        # No byte at all is refused too where it is open for reading alone.
        os.write(target, b"")
        return
    if target is not None:
        # Opened, a pipe would wait for its reader.
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return
    if os.path.islink(path):
        folder = os.path.dirname(os.path.realpath(path))
        if not os.path.isdir(folder):
            # A missing folder is made where the path itself names it.
            reason = f"it is a link into {folder}, and there is no such folder"
            raise FileNotFoundError(errno.ENOENT, reason, os.fspath(path))
    else:
        folder = os.path.dirname(os.path.join(os.curdir, path))
        # A link into nothing is in the way of a folder.
        while not os.path.lexists(folder):
            folder = os.path.dirname(folder)
    # Permissions alone do not tell of root, or of a file system that takes no files.
    tempfile.TemporaryFile(dir=folder).close()


@contextlib.contextmanager
def in_turn(path: epath.PathLike) -> Iterator[None]:
    """Inside is one process at a time; others wait.

    Args:
        path: of a local file for the lock, which is made and stays.

    Raises:
        OSError: it cannot be written, or its file system has no locks.
    """
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def flush(path: epath.PathLike) -> None:
    """Makes a local file's content, or the names in a local folder, outlive a power cut."""
    if is_remote(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(folder: epath.Path) -> None:
    """`flush` of all that is in a folder, and of the folder."""
    for root, _, names in folder.walk():
        for path in (*(root / name for name in names), root):
            flush(path)


def matching(folder: epath.PathLike, pattern: str) -> list[epath.Path]:
    """Paths in a folder, sorted as text; the folder's own name is no pattern, [1] in it no 1.

    Args:
        folder: local or remote; need not exist.
        pattern: of names in it, or of paths from there.
    """
    return sorted(epath.Path(glob.escape(os.fspath(folder))).glob(pattern), key=os.fspath)


def move_folder(
    source: epath.Path, destination: epath.Path, last: str, keep_source: bool = False
) -> None:
    """Renames a folder; no part of it is left at the destination if that fails.

    Object stores cannot: there its files move one by one, the one that makes it count last, and
    `keep_source` copies them, so that the source is complete until the destination is.

    Args:
        source: what is in it, if local, has been flushed.
        destination: does not exist.
        last: name of the file that makes it count.
        keep_source: see above; a local folder is renamed all the same.

    Raises:
        OSError, or what TensorFlow raises of an object store.
    """
    if not is_remote(source):
        source.rename(destination)
        try:
            flush(destination.parent)
        except BaseException:
            destination.rename(source)
            raise
        return
    if destination.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(destination))
    # Of a folder that cannot be listed there would be no files, and all in it is deleted below.
    files = {root / name for root, _, names in source.walk(on_error=_raise) for name in names}
    if source / last not in files:
        raise FileNotFoundError(errno.ENOENT, "it is not in its folder's list", str(source / last))
    try:
        for path in (*sorted(files - {source / last}), source / last):
            target = destination / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            transfer = path.copy if keep_source else path.rename
            transfer(target)
    except BaseException:
        with contextlib.suppress(Exception):
            (destination / last).unlink(missing_ok=True)
            destination.rmtree(missing_ok=True)
        raise
    if not keep_source:
        # The destination is whole, whatever becomes of these empty folders.
        with contextlib.suppress(Exception):
            source.rmtree(missing_ok=True)


def _raise(error: Exception) -> None:
    raise error


def _in_place(path: epath.PathLike) -> int | str | None:
    """What is written to and not replaced: the number of a descriptor of this process, or a path.

    None for a remote path, a regular file, and nothing.
    """
    if is_remote(path) or not os.path.exists(path):
        return None
    own = {os.path.realpath(folder) for folder in ("/proc/self/fd", "/dev/fd")}
    found = os.fspath(epath.Path(path))
    while True:
        folder, name = os.path.split(found)
        folder = os.path.realpath(folder)
        if folder in own:
            return int(name)
        found = os.path.join(folder, name)
        if _DESCRIPTORS.fullmatch(folder) or not (os.path.islink(found) or os.path.isfile(found)):
            return found
        if not os.path.islink(found):
            return None
        found = os.path.join(folder, os.readlink(found))

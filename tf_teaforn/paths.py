"""Local and remote paths, and files that are whole whenever they are read."""

import contextlib
import errno
import os
import secrets
import tempfile

from etils import epath


def is_remote(path: epath.PathLike) -> bool:
    """Whether a path is an address, such as gs://bucket/folder, and not on this machine."""
    return "://" in os.fspath(path)


def write_whole(path: epath.PathLike, content: str | bytes) -> None:
    """Writes a file aside and puts it in place in one step: readers see the old one or the new one.

    A symbolic link stays one: the file it leads to is replaced. A device or a pipe is written to.

    Raises:
        OSError: it cannot be written; what was there is as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    path = epath.Path(path)
    if _is_special(path):
        path.write_bytes(data)
        return
    if not is_remote(path):
        path = epath.Path(os.path.realpath(path))
    # Of its own: several processes may be writing this file.
    aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with aside.open("wb") as file:
            file.write(data)
            if not is_remote(path):
                # The new name must not outlive a power cut without the content.
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
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
    if _is_special(path):
        # Opened, a pipe would wait for its reader.
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return
    folder = os.path.dirname(os.path.realpath(path))
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    # Permissions alone do not tell of root, or of a file system that takes no files.
    tempfile.TemporaryFile(dir=folder).close()


def _is_special(path: epath.PathLike) -> bool:
    """Whether a local path leads to what is neither a regular file nor nothing."""
    return not is_remote(path) and os.path.exists(path) and not os.path.isfile(path)

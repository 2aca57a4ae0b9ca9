"""Local and remote paths, and files that are whole whenever they are read."""

import contextlib
import os

from etils import epath


def is_remote(path: epath.PathLike) -> bool:
    """Whether a path is an address, such as gs://bucket/folder, and not on this machine."""
    return "://" in os.fspath(path)


def write_whole(path: epath.PathLike, content: str | bytes) -> None:
    """Writes a file aside and puts it in place in one step: readers see the old one or the new one.

    Raises:
        OSError: it cannot be written; what was there is as it was.
    """
    path = epath.Path(path)
    aside = path.with_name(f"{path.name}.partial")
    try:
        with aside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if not is_remote(path):
                # The new name must not outlive a power cut without the content.
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise

"""Command lines of a sweep, as they are run and as they are recorded."""

import gzip
import hashlib
import os
import re
import shlex
from collections.abc import Mapping
from typing import Any

from etils import epath

from tf_teaforn.errors import whole_gzip
from tf_teaforn.paths import is_remote

FILES = ("train_files", "valid_files", "test_files")


def flag(name: str, value: Any) -> str:
    """--name=value as absl reads it."""
    return f"--{name}={str(value).lower() if isinstance(value, bool) else value}"


def portable(command: str) -> str:
    """A command line as it is written in a checkout, with paths from the current folder."""
    parts = [from_here(part) for part in shlex.split(command)]
    if parts and not os.path.basename(parts[0]).startswith("teaforn-"):
        parts[0] = f"bin/{os.path.basename(parts[0])}"
    return shlex.join(parts)


def from_here(text: str) -> str:
    """A text whose paths begin at the current folder where they lie in it."""
    # "/data/" is in /mnt/data/train.en too.
    return re.sub(rf"(?<![\w./:-]){re.escape(os.getcwd())}/", "", text)


def task_options_in(command: str) -> dict[str, str]:
    """{flag: files, or the metric} of the data that a command line names."""
    pattern = rf"(?:^|\0)--?({'|'.join((*FILES, 'metric'))})[=\0]([^\0]+)"
    return dict(re.findall(pattern, "\0".join(shlex.split(command))))


def file_names(task_options: Mapping[str, str]) -> dict[str, str]:
    """{flag: files without their folders} of what the user gave."""
    return {
        name: ",".join(os.path.basename(part) for part in value.split(","))
        for name, value in task_options.items()
        if name in FILES
    }


def file_digests(task_options: Mapping[str, str]) -> dict[str, str]:
    """{flag: SHA-256 of the files' content, one after the other, unpacked} of what the user gave.

    Files that are not there, or no local ones, are left to the commands that read them.
    """
    digests = {}
    for name, value in task_options.items():
        paths = [epath.Path(part) for part in value.split(",")]
        if name in FILES and not is_remote(value) and all(path.is_file() for path in paths):
            digest = hashlib.sha256()
            for path in paths:
                unpacked = gzip.open if path.suffix == ".gz" else open
                with whole_gzip(path), unpacked(path, "rb") as file:
                    while block := file.read(1 << 20):
                        digest.update(block)
            digests[name] = digest.hexdigest()
    return digests

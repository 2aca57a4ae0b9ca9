"""Command lines of a sweep, as they are run and as they are recorded."""

import os
import re
import shlex
from collections.abc import Mapping
from typing import Any

FILES = ("train_files", "valid_files", "test_files")


def flag(name: str, value: Any) -> str:
    """--name=value as absl reads it."""
    return f"--{name}={str(value).lower() if isinstance(value, bool) else value}"


def portable(command: str) -> str:
    """A command line as it is written in a checkout, with paths from the current folder."""
    parts = [part.replace(f"{os.getcwd()}/", "") for part in shlex.split(command)]
    if parts and not os.path.basename(parts[0]).startswith("teaforn-"):
        parts[0] = f"bin/{os.path.basename(parts[0])}"
    return shlex.join(parts)


def files_in(command: str) -> dict[str, str]:
    """{flag: files} of the data that a command line names."""
    pattern = rf"(?:^|\0)--?({'|'.join(FILES)})[=\0]([^\0]+)"
    return dict(re.findall(pattern, "\0".join(shlex.split(command))))


def file_names(task_options: Mapping[str, str]) -> dict[str, str]:
    """{flag: files without their folders} of what the user gave."""
    return {
        name: ",".join(os.path.basename(part) for part in value.split(","))
        for name, value in task_options.items()
        if name in FILES
    }

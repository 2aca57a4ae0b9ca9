"""What goes wrong: exceptions that commands turn into one line and an exit code, bad steps."""

import contextlib
import difflib
import gzip
import re
import zlib
from collections.abc import Iterator
from typing import NamedTuple


class UserError(Exception):
    """Input, flags or files that cannot be used.

    The message is one line: what is wrong, where (file, line, flag) and what to do. Command-line
    programs print it and exit with code 2.
    """


def did_you_mean(name, known, most=1):
    """For a message about an unknown name: " Did you mean x or y?", or nothing.

    Args:
        name: what was written.
        known: the names there are.
        most: how many of them to offer at the most.
    """
    close = difflib.get_close_matches(name, known, n=most)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def user_error_in(error):
    """The message of a `UserError` that tf.data or Beam has wrapped in an error of theirs, or None.

    They raise it again as text: its class, its message, and where it came from.
    """
    found = re.search(
        r"\bUserError: (.+?)(?: \[while running|\n|$)", f"{type(error).__name__}: {error}"
    )
    return found and found[1]


def check_backend(name):
    """Raises UserError for a backend of Keras that there is no train step and no search for."""
    if name not in ("tensorflow", "jax"):
        raise UserError(
            f"KERAS_BACKEND={name}: tf_teaforn runs on tensorflow or jax. Set one of them before "
            "Keras is imported."
        )


class StoppedError(Exception):
    """A run that ended early through no fault of its settings; the same command continues it.

    Command-line programs print the one-line message and exit with `exit_code`.
    """

    def __init__(self, message, exit_code):
        super().__init__(message)
        self.exit_code = exit_code


class LostWorkerError(StoppedError):
    """Another worker of the same run, or the device, is gone."""

    def __init__(self, message):
        # EX_TEMPFAIL of sysexits.h: "try again later".
        super().__init__(message, 75)

    @classmethod
    def device(cls, reason):
        """The error for a device that has failed, with the runtime's own words."""
        return cls(
            f"The device has failed or was taken away ({reason}). Start the same command again: it "
            "continues from the last checkpoint."
        )


class OutOfMemoryError(Exception):
    """The device's memory does not hold what a step needs."""


class NonfiniteSteps(NamedTuple):
    """Steps whose loss or gradient was not finite, as a `StepRunner`'s guard has noticed them.

    Attributes:
        count: number of them.
        first: the first of them since they were last asked for, or None.
        what: what was not finite in it, in words.
    """

    count: int
    first: int | None
    what: str


@contextlib.contextmanager
def whole_gzip(path: object) -> Iterator[None]:
    """Inside, what a damaged gzip file makes Python stumble over is a `UserError`."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: not a whole gzip file: {error}.") from error

"""Programs that are measured side by side, each in a process and an environment of its own.

A contender prepares itself, then waits for its turns: only one works at a time.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading

_MARK = "measured "


class Contender:
    """A process that measures itself when told to.

    Args:
        name: in tables.
        command: list of str, a program that calls `take_turns`.
        environment: variables besides this process's.
        limit_s: seconds after which the process is ended, whatever it does; a flag's value.

    Attributes:
        measured: list of dict, one a turn.
    """

    def __init__(self, name, command, environment=None, limit_s=threading.TIMEOUT_MAX):
        self.name = name
        self.measured = []
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._limit_s, self._ended = limit_s, False
        self._timer = threading.Timer(limit_s, self._end)
        self._timer.daemon = True
        self._timer.start()
        self._read()

    def _end(self):
        self._ended = True
        self._process.kill()

    def _read(self):
        """The next dictionary that the process prints."""
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        self.stop()
        if self._ended:
            raise RuntimeError(f"{self.name} was ended after {self._limit_s:g} s (--limit_s)")
        raise RuntimeError(f"{self.name} stopped with exit code {self._process.returncode}")

    def turn(self, **arguments):
        """Lets it measure once; what it measured.

        Raises:
            RuntimeError: the process has ended.
        """
        # `_read` says why there is nobody to write to.
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(arguments), file=self._process.stdin, flush=True)
        self.measured.append(self._read())
        return self.measured[-1]

    def stop(self):
        """Ends the process."""
        # Closes the input, also of one that has ended.
        self._process.communicate()
        self._timer.cancel()

    def median(self, name):
        """Median of what it measured under that name."""
        return statistics.median(measured[name] for measured in self.measured)


def take_turns(measure):
    """In a contender: calls `measure`, which returns a dictionary, with the arguments of a turn."""
    print(_MARK + "{}", flush=True)
    for line in sys.stdin:
        print(_MARK + json.dumps(measure(**json.loads(line))), flush=True)


def print_table(rows):
    """Prints dictionaries with the same keys, one a line."""
    texts = [list(rows[0])]
    texts += [
        [f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for text in texts:
        print("  ".join(value.rjust(width) for value, width in zip(text, widths, strict=True)))

"""Signals that end a run in good order."""

import contextlib
import signal
import sys
import threading

from tf_teaforn.errors import StoppedError


class Interruption(contextlib.AbstractContextManager):
    """Inside, SIGTERM and Ctrl-C (SIGINT) only leave a note, for the loop to stop where it can.

    A Ctrl-C after that ends the process at once.
    """

    def __init__(self):
        self._number = None
        self._earlier = {}
        self._immediate = False

    def __enter__(self):
        # Python delivers signals to the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._earlier[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception):
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    @property
    def requested(self):
        """Whether there was a signal."""
        return self._number is not None

    def stopped(self, step):
        """The exception that ends the run: exit code 143 for SIGTERM, 130 for SIGINT."""
        number = self._number or signal.SIGTERM
        return StoppedError(
            f"Stopped by {signal.Signals(number).name} after step {step}, which is saved. The same "
            "command continues from there.",
            128 + number,
        )

    @contextlib.contextmanager
    def immediate(self, immediate=True):
        """Inside, a signal raises `InterruptedWorkError`: for work that may as well be repeated."""
        self._immediate = immediate
        try:
            yield
        finally:
            self._immediate = False

    def _note(self, number, frame):
        if self.requested:
            return
        self._number = number
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        name = signal.Signals(number).name
        print(f"{name}: saving, then stopping. Ctrl-C stops at once.", file=sys.stderr)
        if self._immediate:
            raise InterruptedWorkError


class InterruptedWorkError(Exception):
    """A signal came within `Interruption.immediate`."""

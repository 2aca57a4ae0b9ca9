"""Signals that end a run in good order."""

import contextlib
import signal
import sys
import threading

from tf_teaforn.errors import StoppedError


class Interruption(contextlib.AbstractContextManager):
    """Inside, SIGTERM, SIGHUP and Ctrl-C only leave a note, for the loop to stop where it can.

    A Ctrl-C after that ends the process at once. SIGHUP says that the terminal is gone; where it is
    ignored, under nohup, it stays so.
    """

    def __init__(self):
        self._number = None
        self._earlier = {}
        self._immediate = False

    def __enter__(self):
        # Python delivers signals to the main thread only.
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGTERM, signal.SIGINT]
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            for number in numbers:
                self._earlier[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception):
        for number, handler in self._earlier.items():
            # None: it was not installed by Python, which cannot put it back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def requested(self):
        """Whether there was a signal."""
        return self._number is not None

    def stopped(self, step):
        """The exception that ends the run, exit code 128 + the signal: 143, 129 or 130."""
        number = self._number or signal.SIGTERM
        return StoppedError(
            f"Stopped by {signal.Signals(number).name} after step {step}, which is saved. The same "
            "command continues from there.",
            128 + number,
        )

    @contextlib.contextmanager
    def immediate(self, immediate=True):
        """Inside, a signal raises `InterruptedWorkError`: for work that may as well be repeated.

        So does one that came before, once this begins.
        """
        self._immediate = immediate
        try:
            # Only now: a signal between a look and the line above would go unnoticed.
            if immediate and self.requested:
                raise InterruptedWorkError
            yield
        finally:
            self._immediate = False

    def _note(self, number, frame):
        if self.requested:
            return
        self._number = number
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        name = signal.Signals(number).name
        # The signal may have come in the middle of a write to stderr, which takes no other then.
        with contextlib.suppress(RuntimeError, OSError):
            print(f"{name}: saving, then stopping. Ctrl-C stops at once.", file=sys.stderr)
        if self._immediate:
            raise InterruptedWorkError


class InterruptedWorkError(Exception):
    """A signal came within `Interruption.immediate`."""

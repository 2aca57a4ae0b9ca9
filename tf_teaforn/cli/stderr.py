"""Standard error without the start-up messages of TensorFlow's C++ code."""

import errno
import io
import os
import re
import signal
import sys


def _logged(level, text):
    """Pattern of E1128 20:48:08.6 12 file.cc:1], or in TensorFlow 2.20 2026-11-28 20:48:08.6: E."""
    return rb"(?:%b\d{4}|\d{4}-\d\d-\d\d [\d:.]+: %b) %b" % (level, level, text)


# No setting of TensorFlow's silences what it logs while it is loaded. Information of every kind is
# left out; of warnings and errors those that change nothing: libraries that register twice, slower
# kernels, large tensors, and that there is no GPU.
_NOISE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\)"
    rb"|To enable the following instructions: |\w+\.cc\(\d+\) LOG\(INFO\)|"
    + b"|".join(
        (
            _logged(b"I", rb"(?:\d\d:\d\d:|\S+:\d+\])"),
            _logged(b"E", rb".*failed call to cuInit: .*UNKNOWN ERROR \(303\)"),
            _logged(b"E", rb".*failed call to cuInit: .*CUDA_ERROR_NO_DEVICE"),
            _logged(b"E", rb".*oneDNN supports DT_INT\d+ only"),
            _logged(b"E", rb".*Unable to register cu\w+ factory"),
            _logged(b"W", rb".*computation placer already registered"),
            _logged(b"W", rb".*exceeds 10% of free system memory"),
        )
    )
)


def quiet_tensorflow():
    """From here on, drops TensorFlow's start-up messages; everything else is shown as before.

    Call it before tensorflow is imported and threads start. Nothing happens where tensorflow is
    there already or TF_CPP_MIN_LOG_LEVEL is set: who sets it wants to see the messages.
    """
    if "tensorflow" in sys.modules:
        return
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        sys.stderr = _text_of(os.dup(2))
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"
    original = os.dup(2)
    reader, writer = os.pipe()
    # A process, not a thread: it still shows the last words of a process that is aborted.
    if os.fork() == 0:
        _relay(reader, original, (0, 1, 2, writer))
    os.close(reader)
    os.dup2(writer, 2)
    os.close(writer)
    # What Python writes need not take the detour.
    sys.stderr = _text_of(original)


def _text_of(descriptor):
    terminal = io.BufferedWriter(_Terminal(descriptor, "w"))
    return io.TextIOWrapper(terminal, errors="backslashreplace", line_buffering=True)


class _Terminal(io.FileIO):
    """Drops what is written once the terminal is gone: nobody sees it, and work is to be saved."""

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


def is_noise(line):
    """Whether a line (bytes) of standard error is one of those that are left out."""
    return _NOISE.match(line) is not None


def _relay(reader, destination, unused):
    """Copies lines until the other end is closed; ends the process."""
    try:
        # These reach the whole process group; there may be something to tell afterwards.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for descriptor in unused:
            os.close(descriptor)
        with os.fdopen(reader, "rb") as lines:
            for line in lines:
                if not is_noise(line):
                    os.write(destination, line)
    finally:
        os._exit(0)

"""Commands in processes of their own, side by side without getting in each other's way."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tf_teaforn.cores import usable_cores


class CommandError(Exception):
    """A command failed; the message is the last line that it printed."""


class EndedError(CommandError):
    """A command was ended, or not begun, because all of them are."""


class Processes:
    """Runs commands, and ends those that run."""

    def __init__(self):
        self._running: set[int] = set()
        self._ended = False
        self._lock = threading.Lock()

    def run(self, name, flags, log, environment, usage):
        """Runs a command to its end; its output goes to the end of `log`.

        Args:
            name: of the file in bin/.
            flags: its flags.
            log: path.
            environment: variables to add.
            usage: filled in however the command ends: "peak_host_bytes", memory of the process.

        Raises:
            CommandError: it failed.
            EndedError: `terminate` was called.
        """
        # bin/sweep's neighbour, or teaforn-sweep's.
        sweep = Path(sys.argv[0])
        program = sweep.with_name(sweep.name.replace("sweep", name))
        start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            output.write(f"$ {shlex.join([str(program), *flags])}\n".encode())
            output.flush()
            process = self._start([sys.executable, str(program), *flags], output, environment)
            try:
                code = _wait(process, usage)
            except BaseException:
                _terminate(process.pid)
                _wait(process, usage)
                raise
            finally:
                with self._lock:
                    self._running.discard(process.pid)
        if code and self._ended:
            raise EndedError(f"{name} was ended")
        if code:
            text = log.read_bytes()[start:].decode(errors="replace")
            lines = [line for line in text.splitlines()[1:] if line.strip()]
            last = lines[-1] if lines else "no output"
            raise CommandError(f"{name} ended with {code}: {last} (see {log})")

    def terminate(self):
        """Sends SIGTERM to all that run; none can be started after."""
        with self._lock:
            self._ended = True
            for pid in self._running:
                _terminate(pid)

    def _start(self, command, output, environment):
        with self._lock:
            if self._ended:
                raise EndedError(f"{command[1]} was not begun")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )
            self._running.add(process.pid)
            return process


def _wait(process, usage):
    """The exit code."""
    _, status, resources = os.wait4(process.pid, 0)
    # Linux counts in KiB, macOS in bytes.
    usage["peak_host_bytes"] = resources.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode


def _terminate(pid):
    # Popen.terminate would collect the exit code of one that has just ended.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def visible_gpus():
    """Identifiers of the GPUs that may be used."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name not in ("", "-1")]
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except OSError:
        return []
    # Parts of a GPU (MIG) are listed below it.
    found = [line for line in done.stdout.splitlines() if line.startswith("GPU ")]
    return [str(index) for index in range(len(found))] if not done.returncode else []


def share(gpus, index, count):
    """Environment of the index-th of so many processes: a GPU, or a share of the cores.

    A single one has all that there is.
    """
    if count == 1:
        return {}
    if gpus:
        # TensorFlow takes nearly all memory of a GPU at its start, and leaves none to a second one.
        growth = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"} if count > len(gpus) else {}
        return {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)], **growth}
    threads = str(max(1, usable_cores() // count))
    return {"TF_NUM_INTRAOP_THREADS": threads, "TF_NUM_INTEROP_THREADS": "1"}

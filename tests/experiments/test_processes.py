"""Commands side by side: their output, what they take, and how they end."""

import os
import signal
import threading
import time

import pytest

from tf_teaforn.cli.sweep import _terminable
from tf_teaforn.errors import StoppedError
from tf_teaforn.experiments import processes
from tf_teaforn.experiments.processes import CommandError, EndedError, Processes


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Writes bin/sweep's neighbour `train`."""
    monkeypatch.setattr("sys.argv", [str(tmp_path / "sweep")])

    def write(text):
        (tmp_path / "train").write_text(text)
        return tmp_path / "train"

    return write


def test_a_command_that_fails_leaves_its_last_line(tmp_path, program):
    path = program("import sys; print('one'); sys.exit(sys.argv[1] == '--bad')")
    log, usage = tmp_path / "log", {}
    Processes().run("train", ["--good"], log, {}, usage)
    assert usage["peak_host_bytes"] > 1_000_000
    with pytest.raises(CommandError, match=r"^train ended with 1: one \(see .*log\)"):
        Processes().run("train", ["--bad"], log, {}, {})
    assert log.read_text().splitlines() == [f"$ {path} --good", "one", f"$ {path} --bad", "one"]


def begun(folder, count, limit=30.0):
    """Process identifiers of so many programs, which write files named by them."""
    end = time.time() + limit
    while len(found := list(folder.glob("*.pid"))) < count:
        assert time.time() < end
        time.sleep(0.02)
    return [int(path.stem) for path in found]


_ENDLESS = "import os, pathlib, time; pathlib.Path(f'{os.getpid()}.pid').touch(); time.sleep(600)"


def test_those_that_run_are_ended_and_no_others_begin(tmp_path, program, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program(_ENDLESS)
    running, errors = Processes(), []

    def run():
        usage = {}
        with pytest.raises(EndedError) as error:
            running.run("train", [], tmp_path / "log", {}, usage)
        errors.append((str(error.value), usage["peak_host_bytes"] > 1_000_000))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    begun(tmp_path, 2)
    running.terminate()
    for thread in threads:
        thread.join(30)
    assert errors == [("train was ended", True)] * 2
    with pytest.raises(EndedError, match="train was not begun"):
        running.run("train", [], tmp_path / "log", {}, {})


def test_sigterm_ends_the_command_that_is_waited_for(tmp_path, program, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program(_ENDLESS)

    def end():
        begun(tmp_path, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    earlier = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=end).start()
    with pytest.raises(StoppedError, match="^Stopped by SIGTERM") as error, _terminable():
        Processes().run("train", [], tmp_path / "log", {}, {})
    assert error.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) == earlier
    (pid,) = begun(tmp_path, 1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_parallel_runs_have_the_cores_or_a_gpu_each(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert processes.share([], 0, 1) == {}
    assert processes.share([], 1, 4)["TF_NUM_INTRAOP_THREADS"] == "2"
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    assert processes.share([], 1, 4)["TF_NUM_INTRAOP_THREADS"] == "3"
    environments = [processes.share(["0", "3"], index, 2) for index in range(2)]
    assert environments == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "3"}]
    # More than there are GPUs.
    for index, gpu in enumerate(("0", "3", "0")):
        assert processes.share(["0", "3"], index, 3) == {
            "CUDA_VISIBLE_DEVICES": gpu,
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert processes.visible_gpus() == ["1", "2"]
    # One run has all devices, for --strategy=mirrored.
    assert processes.share(["1", "2"], 0, 1) == {}


def test_parts_of_a_gpu_are_no_gpus(tmp_path, monkeypatch):
    listed = (
        "GPU 0: NVIDIA A100 (UUID: GPU-1)\n"
        "  MIG 1g.5gb Device 0: (UUID: MIG-1)\n"
        "GPU 1: NVIDIA A100 (UUID: GPU-2)\n"
    )
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{listed}END\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert processes.visible_gpus() == ["0", "1"]

"""Signals leave a note; a second Ctrl-C does not wait."""

import os
import signal
import subprocess
import sys

import pytest

from tf_teaforn.interruption import InterruptedWorkError, Interruption


@pytest.fixture(autouse=True)
def not_under_nohup():
    earlier = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, earlier)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_is_noted_and_the_handlers_come_back(number, code, capsys):
    before = signal.getsignal(number)
    with Interruption() as interruption:
        assert not interruption.requested
        os.kill(os.getpid(), number)
        assert interruption.requested
        # A launcher may send it to the process and to its group.
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(number) is before
    error = interruption.stopped(7)
    assert error.exit_code == code
    assert f"Stopped by {number.name} after step 7, which is saved." in str(error)
    assert capsys.readouterr().err.count("saving, then stopping") == 1


def test_a_hangup_that_is_ignored_stays_so():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not interruption.requested
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_work_that_can_be_repeated_is_left_at_once():
    with Interruption() as interruption:
        with pytest.raises(InterruptedWorkError), interruption.immediate():
            os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.requested
    with Interruption() as interruption:
        with interruption.immediate(False):
            os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.requested


def test_a_signal_before_such_work_counts_too():
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(InterruptedWorkError), interruption.immediate():
            pytest.fail("begun")
        done = []
        # As with several workers, who finish it together.
        with interruption.immediate(False):
            done.append(True)
        assert done


@pytest.mark.parametrize("error", [RuntimeError("reentrant call"), BrokenPipeError()])
def test_a_signal_in_the_middle_of_a_write_to_stderr(error, monkeypatch):
    class Stderr:
        def write(self, text):
            raise error

    with Interruption() as interruption:
        monkeypatch.setattr("sys.stderr", Stderr())
        os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.requested
        with pytest.raises(InterruptedWorkError), interruption.immediate():
            pass


def test_a_handler_that_python_did_not_install(monkeypatch):
    install = signal.signal
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    interruption = Interruption()
    try:
        with monkeypatch.context() as patch:
            # What `signal.signal` returns of one that C code has installed.
            patch.setattr(signal, "signal", lambda *arguments: install(*arguments) and None)
            interruption.__enter__()
        interruption.__exit__(None, None, None)
        assert [signal.getsignal(number) for number in before] == [signal.SIG_DFL] * 3
    finally:
        for number, handler in before.items():
            install(number, handler)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_a_signal_ends_the_process(first):
    code = """
import os, signal, sys
from tf_teaforn.interruption import Interruption
with Interruption():
    os.kill(os.getpid(), int(sys.argv[1]))
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(3)
"""
    done = subprocess.run([sys.executable, "-c", code, str(int(first))], stderr=subprocess.PIPE)
    assert done.returncode == -signal.SIGINT

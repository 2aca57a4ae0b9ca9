"""What all commands share."""

import errno
import io
import sys

import numpy as np
import pytest
import tensorflow as tf
from absl import flags

import tf_teaforn
from tf_teaforn.cli import app
from tf_teaforn.errors import UserError


def test_the_error_of_a_layer_is_told_as_it_was_raised():
    """Keras and AutoGraph put it at the end of pages of their own."""
    sizes = {"num_layers": 1, "hidden_dim": 4}
    model = tf_teaforn.TeaForN(tf_teaforn.build_model("rnn_base", 10, **sizes), n=1)
    ids = np.ones((2, 3), "int32")
    names = ("encoder", "decoder")
    packed = {f"{name}_{kind}": ids for name in names for kind in ("segment_ids", "positions")}
    packed |= {f"{name}_token_ids": ids for name in names}
    with pytest.raises(UserError) as caught:
        tf.function(lambda: model.hidden_states(packed))()
    assert str(app._innermost(caught.value)) == (
        "--batching=pack: a recurrent model would carry its state from one sentence of a row "
        "into the next. Write --batching=bucket."
    )
    assert app._innermost(ValueError("as it is")).args == ("as it is",)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "/x: Permission denied."),
        (OSError(errno.EFBIG, "File too large"), "output: File too large."),
        (
            OSError(errno.ENOTCONN, "Transport endpoint is not connected"),
            "reading or writing: Transport endpoint is not connected.",
        ),
        (
            TimeoutError(errno.ETIMEDOUT, "Connection timed out"),
            "reading or writing: Connection timed out.",
        ),
        (
            FileNotFoundError("The specified path gs://b/x was not found."),
            "The specified path gs://b/x was not found.",
        ),
        (OSError("without a file"), None),
        (io.UnsupportedOperation("not writable"), None),
        (TimeoutError(), None),
    ],
)
def test_errors_of_files_and_disks(error, line):
    """None is a mistake of ours, which keeps its traceback."""
    assert app._os_error_line(error) == line


@pytest.fixture
def parse(monkeypatch):
    """Runs a command with flags of all kinds; returns their values by name."""

    def define_flags(values):
        for name in ("model_dir", "train_files", "tpu"):
            flags.DEFINE_string(name, None, "", flag_values=values)
        flags.DEFINE_list("results", [1], "", flag_values=values)
        flags.DEFINE_integer("n", 1, "", flag_values=values)

    def parse(*arguments):
        found = {}
        monkeypatch.setattr(sys, "argv", ["command", *arguments])
        monkeypatch.setattr(app, "quiet_tensorflow", lambda: None)
        app.run(define_flags, lambda values: found.update(values.flag_values_dict()), "")
        return found

    return parse


def test_the_home_folder_in_paths(parse, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    flags = ("--model_dir=~/run", "--train_files=~/a.en,b~,~/a.fr", "--results=a,~/b", "--tpu=~/t")
    expected = {
        "model_dir": "/home/me/run",
        "train_files": "/home/me/a.en,b~,/home/me/a.fr",
        "tpu": "~/t",
        "results": ["a", "/home/me/b"],
        "n": 1,
    }
    assert parse(*flags) == expected
    assert parse("--n=2")["results"] == [1]


def test_flags_of_a_file_are_those_of_the_command_line(parse, tmp_path):
    (tmp_path / "more").write_text("--tpu=a\n")
    (tmp_path / "flags").write_text(f"# of ours\n--n=2\n\n--flagfile={tmp_path}/more\n--n=3\n")
    assert parse("--n=1", f"--flagfile={tmp_path}/flags", "--model_dir=m")["n"] == 3
    assert sys.argv == ["command", "--n=1", "--n=2", "--tpu=a", "--n=3", "--model_dir=m"]


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--flagfile", "--flagfile names no file. Write --flagfile=FILE."),
        (
            "--flagfile=utf-16",
            "--flagfile=utf-16: this is not UTF-8. Convert the file, with iconv for example.",
        ),
    ],
)
def test_flagfiles_that_cannot_be_read(parse, capsys, tmp_path, monkeypatch, flag, line):
    (tmp_path / "utf-16").write_text("--n=2\n", encoding="utf-16")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        parse("--n=3", flag)
    assert end.value.code == 2
    assert capsys.readouterr().err == f"command: {line}\n"

"""Input that cannot be used, as the commands tell it: the rows of docs/reliability.md."""

import errno
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tf_teaforn import checkpoint
from tf_teaforn.cli import train
from tf_teaforn.config import RunConfig
from tf_teaforn.errors import UserError
from tf_teaforn.model_dir import write_config
from tf_teaforn.task import get_task

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def refused(call_command, capsys):
    """Checks that a command ends with code 2 and one line more than its progress; returns it."""

    def refuse(name, *flags):
        assert call_command(name, *map(str, flags)) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err.splitlines()[-1].removeprefix(f"{name}: ")

    return refuse


@pytest.fixture
def train_flags(corpus, small_model, tmp_path):
    """Flags of bin/train, the last of which is --model_dir=<tmp_path>/model."""
    files = (f"--{split}_files={corpus / split}.tsv" for split in ("train", "valid"))
    return ["--task=text", *files, *small_model, f"--model_dir={tmp_path / 'model'}"]


@pytest.fixture
def copy(trained, tmp_path):
    """A copy of the trained model's folder."""
    return shutil.copytree(trained.model_dir, tmp_path / "copy")


@pytest.mark.parametrize(
    ("command", "flag", "message"),
    [
        ("train", "--model_dir=foo://x/y", r"--model_dir=foo://x/y: there is no file system foo:"),
        ("train", "--train_files=a,foo://y", r"--train_files=a,foo://y: there is no file system"),
        ("evaluate", "--model_dir=foo://x", r"--model_dir=foo://x: there is no file system foo:"),
        ("evaluate", "--model_dir=az://x", r"--model_dir=az://x: there is no file system az:"),
        ("train", "--init_from=hf://x", r"--init_from=hf://x: there is no file system hf://\. W"),
        ("evaluate", "--model_dir=s3://b/x", r"--model_dir=s3://b/x: there is no file system s3:"),
        # As pathlib leaves an address.
        (
            "evaluate",
            "--model_dir=gs:/b/x",
            r"--model_dir=gs:/b/x: there is no file system gs:/\. Write a path, or an address that "
            r"begins with gs://\.",
        ),
        ("report", "--results=a,gs:/b", r"--results=a,gs:/b: there is no file system gs:/\."),
        ("evaluate", "--beam_size=", r"--beam_size=: write whole numbers, e\.g\. 1,4\."),
        ("evaluate", "--beam_alpha=", r"--beam_alpha=: write a number\."),
        ("export", "--beam_size=", r"--beam_size=: write a whole number\."),
        (
            "train",
            "--max_source_length=1000000",
            r"--max_source_length=1000000: write a number",
        ),
        ("train", "--train_steps=" + "9" * 20, r"--train_steps=9+: write 2147483647 or less\."),
    ],
)
def test_values_of_flags(refused, train_flags, command, flag, message):
    flags = [*train_flags, flag] if command == "train" else [flag]
    assert re.match(message, refused(command, *flags))


@pytest.mark.parametrize("name", ["averages", "best", "cache", "checkpoints", "tensorboard"])
def test_files_in_the_way_of_folders(refused, train_flags, tmp_path, name):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_text("x")
    line = refused("train", *train_flags)
    assert line.startswith(f"{tmp_path}/model/{name} is no folder, which a run has there")
    assert os.listdir(tmp_path / "model") == [name]


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "vocab.model"])
def test_folders_in_the_way_of_files(refused, train_flags, tmp_path, name):
    (tmp_path / "model" / name).mkdir(parents=True)
    line = refused("train", *train_flags)
    assert line.startswith(f"{tmp_path}/model/{name} is no file, which a run has there")
    assert os.listdir(tmp_path / "model") == [name]


def test_a_model_dir_that_is_a_file(refused, train_flags, tmp_path):
    (tmp_path / "model").write_text("x")
    path = f"--model_dir={tmp_path}/model"
    assert refused("train", *train_flags) == f"{path} is a file. Name a folder."
    assert refused("evaluate", path) == f"{path}: there is no such folder."


def test_a_model_dir_that_cannot_be_read(refused, train_flags, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()

    def denied(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("os.listdir", denied)
    monkeypatch.setattr("os.scandir", denied)
    line = refused("train", *train_flags)
    assert line == f"--model_dir={tmp_path}/model cannot be read: Permission denied."


def test_a_disk_that_cannot_be_written_to(refused, train_flags, tmp_path, monkeypatch):
    real = os.mkdir

    def mkdir(path, *args, **options):
        if str(path).startswith(str(tmp_path)):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr("os.mkdir", mkdir)
    assert refused("train", *train_flags) == f"{tmp_path}/model: Read-only file system."
    assert os.listdir(tmp_path) == []


def test_a_name_that_is_not_utf_8(refused, train_flags, tmp_path):
    """Files may have one, a folder that TensorFlow writes to may not."""
    name = os.fsdecode(b"caf\xe9")
    for _ in range(2):
        write_config(tmp_path / "model", RunConfig(task="text"), ["train", f"--vocab={name} 1"])
    assert (tmp_path / "model" / "command.txt").read_bytes() == b"train '--vocab=caf\xe9 1'\n" * 2
    line = refused("train", *train_flags, f"--model_dir={tmp_path}/{name}")
    path = rf"{tmp_path}/caf\udce9"
    assert line == f"--model_dir='{path}': the name is not UTF-8. Take another."
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, r"has format version 2; this release reads 1\. Use the release"),
        ({"teaforn": {"n": 0}}, r"cannot be used: --n=0: write 1 or more\."),
        ({"task_options": []}, r"cannot be used: task_options are no names with text or numbers"),
    ],
)
def test_settings_of_a_model_dir(refused, copy, changes, message):
    content = {**json.loads((copy / "config.json").read_text()), **changes}
    (copy / "config.json").write_text(json.dumps(content))
    for command, flags in (
        ("evaluate", []),
        ("decode", ["--input=/dev/null"]),
        ("export", [f"--export_dir={copy}/e"]),
    ):
        line = refused(command, f"--model_dir={copy}", *flags)
        assert re.match(f"{re.escape(str(copy))}/config.json {message}", line)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corpus": "x"}, "--corpus belongs to --task="),
        ({"test_files": 5}, "--test_files=5: write a value of another type."),
        ({"test_files": "../none"}, "../none: no such file. Check --test_files."),
    ],
)
def test_task_options_of_a_model_dir(refused, copy, options, message):
    content = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**content, "task_options": options}))
    assert refused("evaluate", f"--model_dir={copy}").startswith(message)


def test_a_truncated_vocabulary(refused, copy):
    path = copy / "vocab.model"
    path.write_bytes(path.read_bytes()[:-500])
    line = refused("evaluate", f"--model_dir={copy}")
    assert line.startswith(f"{path}: not a SentencePiece model, or a truncated one (")


def test_a_vocabulary_of_another_size_than_the_model(refused, copy, corpus, call_command, capsys):
    flags = ["--task=text", f"--train_files={corpus}/train.tsv", "--vocab_size=300"]
    assert call_command("build_vocab", *flags, f"--output={copy}/vocab.model") == 0
    capsys.readouterr()
    line = refused("decode", f"--model_dir={copy}", "--input=/dev/null")
    assert "the checkpoint does not fit the model: " in line and "the model's is (300, " in line


def test_a_checkpoint_of_fewer_stages(refused, trained, copy):
    """Weights of N decoders, asked of a checkpoint that has one."""
    content = json.loads((copy / "config.json").read_text())
    content["teaforn"]["shared"] = False
    (copy / "config.json").write_text(json.dumps(content))
    before = checkpoint.steps(copy)
    flags = [flag for flag in trained.flags if "model_dir" not in flag]
    line = refused("train", *flags, "--noshared", f"--model_dir={copy}")
    assert line.startswith("the checkpoint does not fit the model: decoder_1/")
    assert checkpoint.steps(copy) == before


def test_an_output_that_is_a_folder(refused, corpus, tmp_path):
    flags = ["--task=text", f"--train_files={corpus}/train.tsv", "--vocab_size=300"]
    line = refused("build_vocab", *flags, f"--output={tmp_path}")
    assert line == f"--output={tmp_path} is a folder. Name a file."
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written(refused, trained, corpus, monkeypatch):
    """Where root cannot write either; known before there is work to lose."""
    monkeypatch.setattr("tf_teaforn.inference.load", lambda *args, **fields: pytest.fail("loaded"))
    monkeypatch.setattr("tf_teaforn.training.build_vocabulary", lambda *args: pytest.fail("built"))
    line = "--output=/proc/none cannot be written: No such file or directory. Name another file."
    flags = [f"--model_dir={trained.model_dir}", "--input=/dev/null"]
    assert refused("decode", *flags, "--output=/proc/none") == line
    flags = ["--task=text", f"--train_files={corpus}/train.tsv", "--vocab_size=300"]
    assert refused("build_vocab", *flags, "--output=/proc/none") == line


@pytest.mark.parametrize("name", ["jax", "libtpu"])
def test_packages_of_the_tpu_compiler(refused, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    find = "importlib.util.find_spec"
    monkeypatch.setattr(find, lambda found, *rest: None if found == name else object())
    line = refused("tpu_check", "--task=demo_enfr")
    assert line == f"The TPU's compiler needs {name}: pip install 'tf-teaforn[tpu_check]'."


@pytest.mark.parametrize("command", ["train", "evaluate", "decode", "score"])
def test_jax_is_missing(refused, monkeypatch, command):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    line = refused(command, "--model_dir=x")
    assert line == "KERAS_BACKEND=jax needs JAX: pip install 'tf-teaforn[jax]'."


def test_jax_writes_no_saved_models(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    task = get_task("demo_enfr")
    config = RunConfig(task="demo_enfr").replace({**task.defaults, "export_on_best": True})
    with pytest.raises(UserError, match="^--export_on_best writes SavedModels, which KERAS_BACK"):
        train.check(config, task)


def test_a_long_line(trained, call_command, capsys, tmp_path):
    """A line of 1 MB is cut, said so, and the lines around it have answers of their own."""
    lines = ["I see the cat", "the cat " * 125_000, "you\u2028have the dog"]
    (tmp_path / "in").write_text("\n".join(lines))
    flags = [f"--model_dir={trained.model_dir}", f"--input={tmp_path}/in", "--beam_size=1"]
    assert call_command("decode", *flags) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 3
    assert captured.err.startswith("Warning: 1 of 3 source lines were cut: more than 24 subwords")


def test_a_long_line_to_evaluate(trained, call_command, caplog, tmp_path):
    (tmp_path / "test.tsv").write_text("I see the cat\tx\n" + "the cat " * 50 + "\ty\n")
    shutil.copytree(trained.model_dir, tmp_path / "model")
    flags = [f"--model_dir={tmp_path}/model", f"--test_files={tmp_path}/test.tsv"]
    assert call_command("evaluate", *flags, "--beam_size=1", "--metrics=exact_match") == 0
    (path,) = (tmp_path / "model" / "eval").glob("test-*.json")
    (warning,) = json.loads(path.read_text())["warnings"]
    assert warning.startswith("1 of 2 source lines were cut: more than 24 subwords, the end of")
    assert f"Warning: {warning}" in caplog.text


def test_all_lines_are_too_long(refused, train_flags, tmp_path):
    (tmp_path / "long.tsv").write_text("the cat " * 125_000 + "\tx\n")
    line = refused("train", *train_flags, f"--train_files={tmp_path}/long.tsv", "--vocab_size=267")
    assert line == (
        "Split train has no example within --max_source_length=24 and --max_target_length=24: "
        "all 1 are longer. Raise them."
    )


def test_the_page_names_tests_that_exist():
    page = (ROOT / "docs" / "reliability.md").read_text()
    code = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = set(re.findall(r"\btest_\w+(?=`)", page))
    assert len(names) > 50
    assert [name for name in sorted(names) if f"def {name}(" not in code] == []
    files = set(re.findall(r"`((?:\w+/)?test_\w+\.py)", page))
    assert [name for name in sorted(files) if not (ROOT / "tests" / name).exists()] == []


def test_documents_that_are_read_by_tf_data(refused, tmp_path):
    (tmp_path / "documents.txt").write_bytes(b"One. Two.\nCaf\xe9.\n")
    flags = ["--task=gsg", f"--train_files={tmp_path}/documents.txt", "--model=transformer_tiny"]
    line = refused("train", *flags, f"--valid_files={tmp_path}/documents.txt", "--model_dir=x")
    assert line.startswith(f"{tmp_path}/documents.txt:2: byte 4 of the line (0xe9) is not UTF-8.")

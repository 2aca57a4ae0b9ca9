"""bin/prepare: its refusals, and its pairs through bin/train's task."""

import sys

import pytest

from tasks.gsg import gsg_task
from tests.documents import DOCUMENTS
from tf_teaforn.lock import locked


@pytest.fixture
def flags(tmp_path):
    lines = [document.replace("\n", "<n>") + "\n" for document in DOCUMENTS]
    (tmp_path / "documents.txt").write_text("".join(lines))
    return (
        "--task=gsg",
        f"--train_files={tmp_path}/documents.txt",
        f"--output_dir={tmp_path}/pairs",
        "--shards=2",
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("--task=demo_enfr", "--train_files belongs to --task=gsg or text, not to demo_enfr."),
        ("--task=text", "--task=text: its pairs are read as they are. Write --task=gsg, with"),
        ("--shards=0", "--shards=0: write a number from 1 to 99999."),
        ("--gap_ratio=1.5", "--gap_ratio=1.5: write a number above 0 and below 1."),
        ("--output_dir=", "--output_dir is missing. Folder to write pairs to."),
        ("--train_files=/none/*.txt", "--train_files=/none/*.txt: there is no such file."),
    ],
)
def test_mistakes(flags, changed, message, call_command, capsys, tmp_path):
    assert call_command("prepare", *flags, changed) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "pairs").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            "--beam_options=--project='x",
            "prepare: --beam_options=--project='x: No closing quotation. Write it as a shell would "
            "have it.\n",
        ),
        ("--runner=Foo", "prepare: Unexpected pipeline runner: Foo. Valid values are "),
    ],
)
def test_options_that_beam_does_not_take(flags, changed, message, call_command, capsys, tmp_path):
    pytest.importorskip("apache_beam")
    assert call_command("prepare", *flags, changed) == 2
    line = capsys.readouterr().err
    assert line.startswith(message) and line.count("\n") == 1
    assert not (tmp_path / "pairs").exists()


def test_one_at_a_time_in_a_folder(flags, call_command, capsys, tmp_path):
    pytest.importorskip("apache_beam")
    left = tmp_path / "pairs" / "train.partial"
    with locked(tmp_path / "pairs", "prepare"):
        left.touch()
        assert call_command("prepare", *flags) == 2
        assert left.exists()
    line = capsys.readouterr().err
    assert line.startswith(f"prepare: --output_dir={tmp_path}/pairs is in use by another bin/pre")
    assert line.count("\n") == 1


def test_beam_is_named_where_it_is_missing(flags, call_command, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "tf_teaforn.data.prepare", raising=False)
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    assert call_command("prepare", *flags) == 2
    assert "bin/prepare needs Apache Beam: run `pip install '.[beam]'`" in capsys.readouterr().err


def test_pairs(flags, call_command, capsys, tmp_path, monkeypatch):
    prism_runner = pytest.importorskip("apache_beam.runners.portability.prism_runner")
    asked = []
    # It would download a program; DirectRunner says nothing when it fails.
    monkeypatch.setattr(
        prism_runner.PrismRunner, "run_pipeline", lambda *_: asked.append(1) or 1 / 0
    )
    in_this_process = "--beam_options=--direct_running_mode=in_memory --direct_num_workers=1"
    assert call_command("prepare", *flags, in_this_process) == 0
    assert asked == []
    assert f"Wrote 2 files to {tmp_path}/pairs." in capsys.readouterr().out
    found, expected = (
        sorted(task.source.dataset("train").as_numpy_iterator())
        for task in (
            gsg_task(prepared=f"{tmp_path}/pairs"),
            gsg_task(train_files=f"{tmp_path}/documents.txt"),
        )
    )
    assert found == expected and len(found) == len(DOCUMENTS)

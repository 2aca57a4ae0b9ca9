"""The task on a user's own files."""

import json

import pytest

from tasks.text import text_task
from tests import nano_model
from tf_teaforn import checkpoint, metrics, training
from tf_teaforn.errors import UserError
from tf_teaforn.task import get_task


def test_files_reach_the_source(tmp_path):
    (tmp_path / "x.tsv").write_text("a cat\tun chat\n")
    (tmp_path / "x.en").write_text("two\nthree\n")
    (tmp_path / "x.fr").write_text("deux\ntrois\n")
    task = text_task(f"{tmp_path}/x.tsv", f"{tmp_path}/x.en,{tmp_path}/x.fr", "", "bleu")
    assert task.source.splits == ("train", "validation")
    assert list(task.source.dataset("train").as_numpy_iterator()) == [(b"a cat", b"un chat")]
    assert list(task.source.dataset("validation").as_numpy_iterator()) == [
        (b"two", b"deux"),
        (b"three", b"trois"),
    ]


@pytest.mark.parametrize(
    ("metric", "headline"), [("bleu", "bleu"), ("chrf", "chrf"), ("rouge", "rougeL")]
)
def test_metric(metric, headline):
    task = text_task("a.tsv", "b.tsv", "c.tsv", metric)
    assert (task.metrics, task.headline_metric) == ((metric,), headline)
    assert task.truncate == (metric == "rouge")
    assert task.defaults["max_target_length"] == (128 if metric == "rouge" else 256)


def test_chrf_picks_the_best_checkpoint_and_counts_for_patience(
    corpus, small_model, call_command, monkeypatch, tmp_path
):
    scores = iter([5.0, 7.0, 6.0, 6.5])
    monkeypatch.setattr(
        training,
        "evaluate_translator",
        lambda _, task, *__: metrics.MetricResult({task.headline_metric: next(scores)}, {}),
    )
    files = (f"--{split}_files={corpus / split}.tsv" for split in ("train", "valid"))
    flags = ["--task=text", "--metric=chrf", *files, *small_model, *nano_model.FLAGS, "--n=1"]
    flags += ["--train_steps=9", "--eval_every=1", "--patience=2", f"--model_dir={tmp_path}"]
    assert call_command("train", *flags) == 0
    assert checkpoint.steps(tmp_path) == [1, 2, 3, 4]
    assert checkpoint.resolve(tmp_path, "best").steps == (2,)
    assert json.loads((tmp_path / "best" / "state.json").read_text())["metrics"] == {"chrf": 7.0}


def test_unknown_metric():
    with pytest.raises(UserError) as error:
        text_task("a.tsv", "b.tsv", "c.tsv", "ter")
    assert str(error.value) == "Unknown --metric=ter. Write one of: bleu, chrf, rouge."


def test_registered_task_takes_files():
    task = get_task("text")
    with pytest.raises(UserError, match="Give --train_files=one TSV file"):
        task.source.dataset("train")
    configured = task.from_files("a.tsv", "b.en,b.fr", "", "rouge")
    assert configured == text_task("a.tsv", "b.en,b.fr", "", "rouge")
    assert configured.name == "text"

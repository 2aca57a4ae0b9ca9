"""The task on a user's own files."""

import pytest

from tasks.text import text_task
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


@pytest.mark.parametrize(("metric", "headline"), [("bleu", "bleu"), ("rouge", "rougeL")])
def test_metric(metric, headline):
    task = text_task("a.tsv", "b.tsv", "c.tsv", metric)
    assert (task.metrics, task.headline_metric) == ((metric,), headline)
    assert task.truncate == (metric == "rouge")


def test_unknown_metric():
    with pytest.raises(UserError) as error:
        text_task("a.tsv", "b.tsv", "c.tsv", "chrf")
    assert str(error.value) == "Unknown --metric=chrf. Write one of: bleu, rouge."


def test_registered_task_takes_files():
    task = get_task("text")
    with pytest.raises(UserError, match="Give --train_files=one TSV file"):
        task.source.dataset("train")
    configured = task.from_files("a.tsv", "b.en,b.fr", "", "rouge")
    assert configured == text_task("a.tsv", "b.en,b.fr", "", "rouge")
    assert configured.name == "text"

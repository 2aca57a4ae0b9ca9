"""The task registry."""

import dataclasses

import pytest

from tf_teaforn import task as task_module
from tf_teaforn.data.sources import GeneratedSource
from tf_teaforn.errors import UserError
from tf_teaforn.task import Task, get_task, register_task, task_names


def _pairs(split):
    return [("a", split)]


def _task(name="letters", metrics=("bleu", "exact_match"), headline_metric="bleu"):
    source = GeneratedSource(_pairs, version="1")
    return Task(name, "one line", source, metrics, headline_metric, defaults={"n": 2})


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch):
    monkeypatch.setattr(task_module, "_tasks", {})


def test_get_task_returns_what_was_registered():
    task = _task()
    assert register_task(task) is task
    assert get_task("letters") is task


def test_task_names_are_sorted():
    for name in ("b", "c", "a"):
        register_task(_task(name))
    assert task_names() == ("a", "b", "c")


def test_a_name_is_taken_once():
    register_task(_task())
    with pytest.raises(ValueError, match="'letters' is registered already"):
        register_task(_task())


def test_unknown_task_names_the_nearest_and_all():
    register_task(_task("wmt14_ende"))
    register_task(_task("gigaword"))
    with pytest.raises(UserError) as error:
        get_task("wmt14_deen")
    assert str(error.value) == (
        "Unknown task 'wmt14_deen'. Did you mean wmt14_ende? "
        "Write --task= one of: gigaword, wmt14_ende."
    )


def test_unknown_task_without_a_near_name():
    register_task(_task("gigaword"))
    with pytest.raises(UserError) as error:
        get_task("xyz")
    assert str(error.value) == "Unknown task 'xyz'. Write --task= one of: gigaword."


def test_chrf_can_be_the_headline_beside_bleu():
    assert _task(metrics=("bleu", "chrf"), headline_metric="chrf").headline_metric == "chrf"


@pytest.mark.parametrize("headline", ["rouge1", "rouge2", "rougeL", "rougeLsum"])
def test_rouge_values_can_be_the_headline(headline):
    assert _task(metrics=("rouge",), headline_metric=headline).headline_metric == headline


@pytest.mark.parametrize(
    ("metrics", "headline", "message"),
    [
        (("ter",), "ter", "metric 'ter' is none of"),
        (("bleu",), "rougeL", "headline_metric 'rougeL' is none of"),
        (("rouge",), "rouge", "headline_metric 'rouge' is none of"),
        ((), "bleu", "headline_metric 'bleu' is none of"),
    ],
)
def test_metrics_that_cannot_be(metrics, headline, message):
    with pytest.raises(ValueError, match=message):
        _task(metrics=metrics, headline_metric=headline)


def test_tasks_are_values():
    task = _task()
    with pytest.raises(dataclasses.FrozenInstanceError):
        task.name = "other"
    assert task == _task()
    assert dataclasses.replace(task, name="other") != task

"""WMT, Gigaword and CNN/DailyMail: on TFDS's mock data, and on the real builders' data on disk."""

import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import tensorflow_datasets as tfds
from rouge_score import rouge_scorer

import tasks  # noqa: F401
from tasks.gigaword import unk_as_text
from tf_teaforn.data.sources import with_data_dir
from tf_teaforn.errors import UserError
from tf_teaforn.task import get_task, task_names

# Task -> builder, source and target features.
_TASKS = {
    "wmt14_ende": ("wmt14_translate/de-en", "en", "de"),
    "wmt14_enfr": ("wmt14_translate/fr-en", "en", "fr"),
    "gigaword": ("gigaword", "document", "summary"),
    "cnn_dailymail": ("cnn_dailymail", "article", "highlights"),
}
_SPLITS = ("train", "validation", "test")


def test_all_are_registered():
    assert {*_TASKS, "demo_enfr", "demo_ende", "text"} <= set(task_names())


def test_importing_tasks_opens_no_data():
    code = "import sys, tasks; sys.exit('tensorflow_datasets' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("name", _TASKS)
def test_mock_data(name):
    builder_name, source_key, target_key = _TASKS[name]
    source = get_task(name).source
    assert source.splits == _SPLITS
    with tfds.testing.mock_data(num_examples=5):
        examples = list(tfds.load(builder_name, split="train").as_numpy_iterator())
        expected = [(example[source_key], example[target_key]) for example in examples]
        for split in _SPLITS:
            assert list(source.dataset(split).as_numpy_iterator()) == expected
        assert source.fingerprint("train") != source.fingerprint("test")
    assert len(set(expected)) == 5


@pytest.mark.parametrize("name", _TASKS)
def test_not_prepared(name, tmp_path):
    source = with_data_dir(get_task(name).source, str(tmp_path))
    with pytest.raises(UserError) as error:
        source.dataset("train")
    command = f"tfds.builder('{_TASKS[name][0]}', data_dir='{tmp_path}').download_and_prepare()"
    assert command in str(error.value)


_EXAMPLES = {
    "wmt14_ende": {"en": "A cat.", "de": "Eine Katze."},
    "wmt14_enfr": {"en": "A cat.", "fr": "Un chat."},
    "gigaword": {"document": "the <unk> rose #.# percent", "summary": "UNK<unk> up #"},
    "cnn_dailymail": {
        "article": "One. Two.",
        "highlights": "First point .\nSecond point .",
        "publisher": "cnn",
        "id": "0123",
    },
}
_PAIRS = {
    "wmt14_ende": (b"A cat.", b"Eine Katze."),
    "wmt14_enfr": (b"A cat.", b"Un chat."),
    "gigaword": (b"the UNK rose #.# percent", b"UNKUNK up #"),
    "cnn_dailymail": (b"One. Two.", b"First point .\nSecond point ."),
}


@pytest.mark.parametrize("name", _TASKS)
def test_real_builder_prepared_on_disk(name, tmp_path):
    builder_name = _TASKS[name][0]
    builder = tfds.builder(builder_name, data_dir=tmp_path)

    def examples(dl_manager):
        return {split: [(index, _EXAMPLES[name]) for index in range(3)] for split in _SPLITS}

    # Everything of the builder but the download.
    with mock.patch.object(builder, "_split_generators", examples):
        offline = tfds.download.DownloadConfig(try_download_gcs=False)
        builder.download_and_prepare(download_config=offline)
    source = with_data_dir(get_task(name).source, str(tmp_path))
    for split in _SPLITS:
        dataset = source.dataset(split)
        assert dataset.cardinality() == 3
        assert list(dataset.as_numpy_iterator()) == [_PAIRS[name]] * 3
    assert source.fingerprint("train") != source.fingerprint("test")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wmt14_ende", {"n": 2, "discount": 0.5, "train_steps": 1_000_000, "beam_size": 4}),
        ("wmt14_enfr", {"n": 2, "discount": 0.5, "train_steps": 1_000_000, "beam_size": 4}),
        (
            "gigaword",
            {
                "n": 3,
                "discount": 0.5,
                "train_steps": 160_000,
                "eval_every": 1000,
                "eval_examples": 1000,
                "max_source_length": 128,
                "max_target_length": 32,
                "beam_size": 8,
                "beam_alpha": 0.6,
            },
        ),
        (
            "cnn_dailymail",
            {
                "n": 3,
                "discount": 0.5,
                "train_steps": 400_000,
                "eval_every": 1000,
                "eval_examples": 1000,
                "max_source_length": 1024,
                "max_target_length": 128,
                "beam_size": 8,
                "beam_alpha": 0.8,
            },
        ),
    ],
)
def test_settings_of_the_paper(name, expected):
    defaults = get_task(name).defaults
    assert {key: defaults[key] for key in expected} == expected
    assert defaults["shared"] is True
    # PEGASUS reads the beginning of a document that is too long.
    assert get_task(name).truncate == (not name.startswith("wmt"))


def test_metrics():
    found = {name: (get_task(name).metrics, get_task(name).headline_metric) for name in _TASKS}
    assert found == {
        "wmt14_ende": (("bleu",), "bleu"),
        "wmt14_enfr": (("bleu",), "bleu"),
        "gigaword": (("rouge",), "rougeL"),
        "cnn_dailymail": (("rouge",), "rougeLsum"),
    }


def test_unknown_words_of_gigaword_are_text_to_the_model_and_equal_to_rouge():
    source, target = unk_as_text("a <unk> b<unk>", "<UNK> unk <unkn>")
    assert (source.numpy(), target.numpy()) == (b"a UNK bUNK", b"<UNK> unk <unkn>")
    scorer = rouge_scorer.RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
    scores = scorer.score("the <unk> rose #.# percent", "the UNK rose percent")
    assert all(score.fmeasure == 1 for score in scores.values())

"""What bin/evaluate computes and writes, with a translator of known answers."""

import json
import types

import pytest
import sacrebleu

from tf_teaforn import checkpoint, evaluation, model_dir
from tf_teaforn.config import RunConfig
from tf_teaforn.data.sources import GeneratedSource
from tf_teaforn.errors import UserError
from tf_teaforn.task import Task

REFERENCES = ["one two three four five", "a b\nc d", "same again and again"]
ANSWERS = {1: ["one two three five", "a b\nc d", ""], 4: ["one two three four five", "x", "same"]}


def pairs(split):
    return [] if split == "empty" else [(f"source {i}", ref) for i, ref in enumerate(REFERENCES)]


TASK = Task(
    name="test",
    description="",
    source=GeneratedSource(pairs, version="1", splits=("test", "wmt13/a:b", "empty")),
    metrics=("bleu", "exact_match"),
    headline_metric="bleu",
    defaults={},
)


class FakeTranslator:
    def __init__(self, seq2seq, tokenizer, config, max_source_length, max_target_length):
        self.config = config

    def decode(self, texts, progress=False):
        assert texts == [f"source {i}" for i in range(3)]
        return [[(answer, -1.0, -1.0)] for answer in ANSWERS[self.config.beam_size]]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model directory whose model is the fake one."""
    model_dir.write_config(tmp_path, RunConfig(task="test").replace({"beam_alpha": 1}), ["train"])
    found = checkpoint.Checkpoint("average-2-30", (tmp_path,) * 2, (20, 30))
    tokenizer = types.SimpleNamespace(vocabulary_size=8)
    monkeypatch.setattr(model_dir, "read_tokenizer", lambda folder: tokenizer)
    monkeypatch.setattr(model_dir, "load_seq2seq", lambda *args: (None, found))
    monkeypatch.setattr(evaluation, "Translator", FakeTranslator)
    return tmp_path


def test_files(folder):
    results = evaluation.evaluate(folder, TASK, "test", "average:2", [1, 4], 0.5)
    names = [f"test-average-2-30-beam{beam}-alpha0.5" for beam in (1, 4)]
    files = sorted(path.name for path in (folder / "eval").iterdir())
    assert files == [f"{name}.{kind}" for name in names for kind in ("json", "txt")]
    for name, beam, result in zip(names, (1, 4), results, strict=True):
        assert json.loads((folder / "eval" / f"{name}.json").read_text()) == result
        text = (folder / "eval" / f"{name}.txt").read_bytes().decode()
        assert text == "".join(answer.replace("\n", "<n>") + "\n" for answer in ANSWERS[beam])
        assert result.pop("seconds") >= 0
        bleu = sacrebleu.BLEU()
        score = bleu.corpus_score(ANSWERS[beam], [REFERENCES]).score
        equal = sum(a == b for a, b in zip(ANSWERS[beam], REFERENCES, strict=True))
        assert result == {
            "metrics": {
                "bleu": pytest.approx(score),
                "exact_match": pytest.approx(100 * equal / 3),
            },
            "signature": {
                "bleu": str(bleu.get_signature()),
                "exact_match": "nrefs:1|case:mixed|tok:none",
            },
            "examples": 3,
            "beam_size": beam,
            "beam_alpha": 0.5,
            "checkpoint": "average-2-30",
            "steps": [20, 30],
            "split": "test",
        }


def test_the_run_s_search_is_the_default(folder):
    (result,) = evaluation.evaluate(folder, TASK)
    assert (result["beam_size"], result["beam_alpha"]) == (4, 1.0)
    assert (folder / "eval" / "test-average-2-30-beam4-alpha1.0.json").exists()


def test_separators_in_a_split_s_name(folder):
    evaluation.evaluate(folder, TASK, "wmt13/a:b", beam_sizes=[1])
    assert (folder / "eval" / "wmt13_a_b-average-2-30-beam1-alpha1.0.txt").exists()


def test_refusals_come_before_the_model_is_loaded(folder, monkeypatch):
    monkeypatch.setattr(model_dir, "load_seq2seq", lambda *args: pytest.fail("loaded"))
    with pytest.raises(
        UserError, match="^This task has no split 'dev'. Write one of: test, wmt13/a:b, empty"
    ):
        evaluation.evaluate(folder, TASK, "dev")
    with pytest.raises(UserError, match="^The split empty has no examples"):
        evaluation.evaluate(folder, TASK, "empty")
    with pytest.raises(UserError, match="^--beam_size=0: write 1 or more"):
        evaluation.evaluate(folder, TASK, beam_sizes=[4, 0])
    assert not (folder / "eval").exists()


def test_read_examples():
    sources, references = evaluation.read_examples(TASK.source, "test")
    assert sources == ["source 0", "source 1", "source 2"]
    assert references == REFERENCES

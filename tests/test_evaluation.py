"""What bin/evaluate computes and writes, with a translator of known answers."""

import concurrent.futures
import dataclasses
import functools
import hashlib
import http.client
import io
import json
import logging
import subprocess
import sys
import tarfile
import threading
import types
from pathlib import Path

import portalocker
import pytest
import sacrebleu

from tf_teaforn import evaluation, metrics, model_dir
from tf_teaforn.config import RunConfig
from tf_teaforn.data.sources import GeneratedSource, TfdsSource
from tf_teaforn.data.test_sets import language_pair_of, read_test_set
from tf_teaforn.errors import UserError
from tf_teaforn.evaluation import Request
from tf_teaforn.task import Task
from tf_teaforn.texts import read_lines, to_lines

REFERENCES = ["one two three four five", "a b\nc d", "same again and again"]
SACREBLEU = {"bleu": sacrebleu.BLEU, "chrf": sacrebleu.CHRF, "ter": sacrebleu.TER}
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
    cut = 0

    def __init__(self, seq2seq, tokenizer, config, max_source_length, max_target_length):
        self.config = config
        self.max_source_length = max_source_length
        self.cut_sources = 0

    def __call__(self, texts, progress=False):
        assert texts == [f"source {i}" for i in range(3)]
        self.cut_sources += self.cut
        return ANSWERS[self.config.beam_size]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model directory whose model is the fake one."""
    model_dir.write_config(tmp_path, RunConfig(task="test").replace({"beam_alpha": 1}), ["train"])
    state = {"checkpoint": "average-2-30", "steps": [20, 30]}
    tokenizer = types.SimpleNamespace(vocabulary_size=8)
    monkeypatch.setattr(evaluation, "load_tokenizer", lambda folder: tokenizer)
    monkeypatch.setattr(model_dir, "load_seq2seq", lambda *args: (None, state))
    monkeypatch.setattr(evaluation, "Translator", FakeTranslator)
    return tmp_path


def test_files(folder, monkeypatch):
    now, answers = [0.0], FakeTranslator.__call__

    def slow(translator, *args, **kwargs):
        now[0] += translator.config.beam_size
        return answers(translator, *args, **kwargs)

    monkeypatch.setattr(FakeTranslator, "__call__", slow)
    monkeypatch.setattr(evaluation, "time", types.SimpleNamespace(time=lambda: now[0]))
    request = Request(
        checkpoint="average:2", beam_sizes=[1, 4], alpha=0.5, command=["evaluate", "--a=b c"]
    )
    results = evaluation.evaluate(folder, TASK, request)
    names = [f"test-average-2-30-beam{beam}-alpha0.5" for beam in (1, 4)]
    files = sorted(path.name for path in (folder / "eval").iterdir())
    expected = [f"{name}.{kind}" for name in names for kind in ("json", "txt")]
    assert files == [*expected, "test.references.txt"]
    references = (folder / "eval" / "test.references.txt").read_bytes()
    assert references == b"one two three four five\na b<n>c d\nsame again and again\n"
    assert read_lines(folder / "eval" / "test.references.txt") == REFERENCES
    for name, beam, result in zip(names, (1, 4), results, strict=True):
        assert json.loads((folder / "eval" / f"{name}.json").read_text()) == result
        text = (folder / "eval" / f"{name}.txt").read_bytes().decode()
        assert text == "".join(answer.replace("\n", "<n>") + "\n" for answer in ANSWERS[beam])
        assert result.pop("seconds") == beam
        of = {name: metric() for name, metric in SACREBLEU.items()}
        scores = {
            name: metric.corpus_score(ANSWERS[beam], [REFERENCES]).score
            for name, metric in of.items()
        }
        equal = sum(a == b for a, b in zip(ANSWERS[beam], REFERENCES, strict=True))
        assert result == {
            "metrics": {
                **{name: pytest.approx(score) for name, score in scores.items()},
                "exact_match": pytest.approx(100 * equal / 3),
            },
            "signature": {
                **{name: str(metric.get_signature()) for name, metric in of.items()},
                "exact_match": "nrefs:1|case:mixed|tok:none",
            },
            "examples": 3,
            "beam_size": beam,
            "beam_alpha": 0.5,
            "checkpoint": "average-2-30",
            "steps": [20, 30],
            "split": "test",
            "references_sha256": hashlib.sha256(references).hexdigest(),
            "warnings": [],
            "command": "evaluate '--a=b c'",
        }


def test_the_run_s_search_is_the_default(folder):
    (result,) = evaluation.evaluate(folder, TASK)
    assert (result["beam_size"], result["beam_alpha"]) == (4, 1.0)
    assert (folder / "eval" / "test-average-2-30-beam4-alpha1.0.json").exists()


def test_separators_in_a_split_s_name(folder):
    evaluation.evaluate(folder, TASK, Request("wmt13/a:b", beam_sizes=[1]))
    assert (folder / "eval" / "wmt13_a_b-average-2-30-beam1-alpha1.0.txt").exists()


def test_refusals_come_before_the_model_is_loaded(folder, monkeypatch):
    monkeypatch.setattr(model_dir, "load_seq2seq", lambda *args: pytest.fail("loaded"))
    with pytest.raises(
        UserError, match="^This task has no split 'dev'. Write one of: test, wmt13/a:b, empty"
    ):
        evaluation.evaluate(folder, TASK, Request("dev"))
    with pytest.raises(UserError, match="^The split empty has no examples"):
        evaluation.evaluate(folder, TASK, Request("empty"))
    with pytest.raises(UserError, match="^--beam_size=0: write 1 or more"):
        evaluation.evaluate(folder, TASK, Request(beam_sizes=[4, 0]))
    with pytest.raises(UserError, match="^there is no metric 'meteor'"):
        evaluation.evaluate(folder, TASK, Request(metrics=["bleu", "meteor"]))
    with pytest.raises(UserError, match="^--language_pair belongs to --test_set"):
        evaluation.evaluate(folder, TASK, Request(language_pair="en-de"))
    with pytest.raises(UserError, match="^--test_set=wmt14: the task does not say which languages"):
        evaluation.evaluate(folder, TASK, Request(test_set="wmt14"))
    with pytest.raises(UserError, match="no such test set. Did you mean wmt14/full or"):
        evaluation.evaluate(folder, TASK, Request(test_set="wmt14/ful", language_pair="en-de"))
    with pytest.raises(UserError, match="^--language_pair=de-fr: the test set wmt14 has .*en-fr"):
        evaluation.evaluate(folder, TASK, Request(test_set="wmt14", language_pair="de-fr"))
    with pytest.raises(UserError, match="^--compare=/no: there is no such file"):
        evaluation.evaluate(folder, TASK, Request(compare="/no"))
    (folder / "other.txt").write_text("one line\n")
    with pytest.raises(UserError, match="has 1 lines for 3 references"):
        evaluation.evaluate(folder, TASK, Request(compare=str(folder / "other.txt")))
    (folder / "latin1.txt").write_bytes("é\n".encode("latin-1"))
    with pytest.raises(UserError, match="latin1.txt:1: byte 1 of the line .0xe9. is not UTF-8"):
        evaluation.evaluate(folder, TASK, Request(compare=str(folder / "latin1.txt")))
    assert not (folder / "eval").exists()


def test_another_system_s_output_is_read_as_users_write_it(tmp_path):
    (tmp_path / "other.txt").write_bytes("\ufeffone\r\n\r\ntwo<n>lines\r\n".encode())
    assert evaluation._baseline(tmp_path / "other.txt", 3) == ["one", "", "two\nlines"]


def test_read_examples():
    sources, references = evaluation.read_examples(TASK.source, "test")
    assert sources == ["source 0", "source 1", "source 2"]
    assert references == REFERENCES


@pytest.fixture
def wmt14(tmp_path, monkeypatch):
    """sacreBLEU's cache, in another place, and without a network."""
    dataset = sacrebleu.DATASETS["wmt14"]
    monkeypatch.setattr(dataset, "_outdir", str(tmp_path / "cache" / "wmt14"))
    monkeypatch.setattr(dataset, "_rawdir", str(tmp_path / "cache" / "wmt14" / "raw"))

    def unreachable(url):
        raise OSError("Temporary failure in name resolution")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    return dataset


def test_a_test_set_that_is_not_cached(folder, wmt14):
    with pytest.raises(
        UserError,
        match=r"^--test_set=wmt14 is not in sacrebleu's cache and cannot be downloaded "
        r"\(Temporary failure in name resolution\). Run `sacrebleu --download wmt14 -l en-de`",
    ):
        evaluation.evaluate(folder, TASK, Request(test_set="wmt14", language_pair="en-de"))


def test_a_test_set_whose_download_breaks_off(wmt14, tmp_path, monkeypatch):
    class Cut(io.BytesIO):
        def read(self):
            raise http.client.IncompleteRead(b"some")

    monkeypatch.setattr("urllib.request.urlopen", lambda url: Cut())
    with pytest.raises(UserError, match=r"cannot be downloaded \(IncompleteRead"):
        read_test_set("wmt14", "en-de")


def test_a_test_set_that_was_unpacked_in_part(wmt14, tmp_path, monkeypatch):
    (url,) = wmt14.data
    archive = tmp_path / "cache" / "wmt14" / "raw" / wmt14._get_tarball_filename(url)
    archive.parent.mkdir(parents=True)
    archive.write_bytes(b"whole")
    monkeypatch.setattr(wmt14, "md5", [hashlib.md5(b"whole").hexdigest()])
    with pytest.raises(UserError) as error:
        read_test_set("wmt14", "en-de")
    lacking = next(iter(wmt14.langpairs["en-de"]))
    assert str(error.value) == (
        f"--test_set=wmt14: {archive.parent} lacks {archive.parent / lacking}, as if it had been "
        f"unpacked in part. Remove {tmp_path}/cache/wmt14 and try again."
    )


def test_a_log_in_page_in_place_of_a_test_set(folder, wmt14, tmp_path, monkeypatch):
    page = b"<html>Please log in</html>"
    monkeypatch.setattr("urllib.request.urlopen", lambda url: io.BytesIO(page))
    request = Request(test_set="wmt14", language_pair="en-de")

    def refused():
        with pytest.raises(UserError) as error:
            evaluation.evaluate(folder, TASK, request)
        return str(error.value)

    message = refused()
    (archive,) = (tmp_path / "cache").rglob("*.tgz")
    assert archive.read_bytes() == page
    assert message == (
        f"--test_set=wmt14: {archive} is not what sacrebleu expects, perhaps a network's log-in "
        "page in its place. Remove that file and try again."
    )
    # The page stays in the cache; other releases of sacrebleu unpack it then.
    assert refused() == message
    monkeypatch.setattr(wmt14, "get_files", lambda pair: tarfile.open(archive))
    assert refused() == message


def cached(dataset):
    """{field: path} of a test set in the cache, whose folder is there."""
    fields = dataset.fieldnames("en-de")
    paths = {field: Path(dataset._get_txt_file_path("en-de", field)) for field in fields}
    paths["src"].parent.mkdir(parents=True, exist_ok=True)
    return paths


def test_a_test_set_that_another_process_is_writing(wmt14, monkeypatch):
    begun, ready = threading.Event(), threading.Event()

    def process_to_text(pair):
        files = [open(path, "w") for path in cached(wmt14).values()]
        for line in ("one\n", "two\n"):
            for file in files:
                file.write(line)
                file.flush()
            begun.set()
            assert ready.wait(60)
        for file in files:
            file.close()

    monkeypatch.setattr(wmt14, "process_to_text", process_to_text)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        writer = pool.submit(read_test_set, "wmt14", "en-de")
        assert begun.wait(60)
        reader = pool.submit(read_test_set, "wmt14", "en-de")
        concurrent.futures.wait([reader], timeout=0.3)
        ready.set()
    assert writer.result() == reader.result() == (["one", "two"], ["one", "two"])


def test_a_test_set_in_a_cache_without_locks(wmt14):
    for path in cached(wmt14).values():
        path.write_text("one\n")
    # No file can be opened there.
    path.with_name("tf_teaforn.lock").mkdir()
    assert read_test_set("wmt14", "en-de") == (["one"], ["one"])


def test_a_test_set_that_takes_long_to_download(wmt14, tmp_path, monkeypatch):
    (url,) = wmt14.data
    lock = tmp_path / "cache" / "wmt14" / "raw" / f"{wmt14._get_tarball_filename(url)}.lock"
    cached(wmt14)
    lock.parent.mkdir()
    at_once = functools.partial(portalocker.Lock, timeout=0)
    monkeypatch.setattr(portalocker, "Lock", lambda path, timeout: at_once(path))
    with at_once(lock), pytest.raises(UserError) as error:
        read_test_set("wmt14", "en-de")
    assert str(error.value) == (
        f"--test_set=wmt14: another process has been downloading it to {lock.parent} for a minute. "
        "Wait for it, or end it, and try again."
    )


def test_a_test_set_of_sacrebleu(folder, wmt14):
    lines = {"src": [f"source {i}" for i in range(3)], "ref": ["x y", "été\u2028", " z "]}
    for field, path in cached(wmt14).items():
        path.write_text("\n".join(lines.get(field, ["-"] * 3)) + "\n")
    task = Task("wmt", "", TfdsSource("wmt14_translate/de-en", "en", "de"), ("bleu",), "bleu", {})
    assert language_pair_of(task.source) == "en-de"
    (result,) = evaluation.evaluate(folder, task, Request(test_set="wmt14", beam_sizes=[4]))
    assert result["split"] == "wmt14" and result["examples"] == 3
    references = folder / "eval" / "wmt14.references.txt"
    assert references.read_bytes() == "x y\nété\n z\n".encode()
    assert (folder / "eval" / "wmt14-average-2-30-beam4-alpha1.0.json").exists()


def test_the_sacrebleu_command_agrees_on_the_files(folder):
    (result,) = evaluation.evaluate(folder, TASK, Request(beam_sizes=[4]))
    # A newline inside a text is a space to sacreBLEU.
    for name in ("test.references", "test-average-2-30-beam4-alpha1.0"):
        path = folder / "eval" / f"{name}.txt"
        path.write_text(path.read_text().replace("<n>", " "))
    command = ["-m", "sacrebleu", "eval/test.references.txt", "-i", str(path), "-w", "10"]
    done = subprocess.run(
        [sys.executable, *command, "-m", "bleu", "chrf", "ter"],
        cwd=folder,
        capture_output=True,
        check=True,
    )
    for expected, value in zip(json.loads(done.stdout), ("bleu", "chrf", "ter"), strict=True):
        assert 0 < expected["score"] < 100
        assert result["metrics"][value] == pytest.approx(expected["score"], abs=1e-9)
        assert result["signature"][value] == expected["signature"]


def test_comparison_and_intervals(folder):
    evaluation.evaluate(folder, TASK, Request(beam_sizes=[1]))
    other = str(folder / "eval" / "test-average-2-30-beam1-alpha1.0.txt")
    request = Request(beam_sizes=[4], compare=other, intervals=True)
    (result,) = evaluation.evaluate(folder, TASK, request)
    assert result["compared_with"] == other
    assert set(result["comparison"]) == {"bleu", "chrf", "ter", "exact_match"}
    expected = metrics.compare("bleu", ANSWERS[1], ANSWERS[4], REFERENCES)
    assert result["comparison"]["bleu"]["p_value"] == expected.p_value
    low, high = result["interval_95"]["bleu"]
    assert low < result["metrics"]["bleu"] < high


def test_results_of_other_references_stay_together(folder, caplog):
    def contents(path):
        return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}

    results = folder / "eval"
    results.mkdir()
    # Those of other sets, though they are called alike.
    others = {"test-2.references.txt": b"x\n", "test-2-best-beam4-alpha1.0.txt": b"y\n"}
    for name, content in others.items():
        (results / name).write_bytes(content)
    evaluation.evaluate(folder, TASK, Request(beam_sizes=[1, 4]))
    evaluation.evaluate(folder, TASK, Request(beam_sizes=[1], metrics=["bleu"]))
    assert not list(results.glob("test-????????")) and not caplog.records
    before = contents(results)
    assert len(before) == 2 + 5

    turned = GeneratedSource(lambda split: [(s, t[::-1]) for s, t in pairs(split)], version="2")
    task = dataclasses.replace(TASK, source=turned)
    evaluation.evaluate(folder, task, Request(beam_sizes=[4]))
    name = hashlib.sha256(before["test.references.txt"]).hexdigest()[:8]
    assert contents(results / f"test-{name}") | others == before
    stem = "test-average-2-30-beam4-alpha1.0"
    after = contents(results)
    assert set(after) == {*others, "test.references.txt", f"{stem}.json", f"{stem}.txt"}
    assert after["test.references.txt"] == to_lines([text[::-1] for text in REFERENCES])
    assert f"it is in {results}/test-{name} now" in caplog.text


def test_sources_that_were_cut(folder, monkeypatch, caplog):
    monkeypatch.setattr(FakeTranslator, "cut", 2)
    warning = (
        "2 of 3 source lines were cut: more than 256 subwords, the end of sentence included "
        "(--max_source_length of bin/train)."
    )
    results = evaluation.evaluate(folder, TASK, Request(beam_sizes=[1, 4]))
    assert [result["warnings"] for result in results] == [[warning], [warning]]
    # They are the same for both.
    assert caplog.messages == [f"Warning: {warning}"]


def test_text_that_looks_tokenised(folder, monkeypatch, caplog):
    monkeypatch.setitem(ANSWERS, 4, ["on@@ e two", "a , b", "same"])
    with caplog.at_level(logging.WARNING):
        (result,) = evaluation.evaluate(folder, TASK, Request(beam_sizes=[4]))
    (warning,) = result["warnings"]
    assert warning.startswith("1 of 3 hypotheses have subword marks") and warning in caplog.text

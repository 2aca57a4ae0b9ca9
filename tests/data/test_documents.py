"""Documents read from files and TFDS, and their pairs, in one process and in several."""

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from tests.documents import DOCUMENTS
from tf_teaforn.data import documents
from tf_teaforn.data.documents import (
    DocumentFiles,
    GapSource,
    PreparedSource,
    TfdsDocuments,
    in_processes,
    shard_names,
)
from tf_teaforn.data.gaps import GapSettings, gap_example, gap_examples
from tf_teaforn.data.sources import with_data_dir
from tf_teaforn.errors import UserError, user_error_in


@pytest.fixture
def folder(tmp_path):
    lines = [document.replace("\n", "<n>") for document in DOCUMENTS]
    (tmp_path / "a1.txt").write_text(f"{lines[0]}\n\n{lines[1]}\r\n")
    with gzip.open(tmp_path / "a2.txt.gz", "wt") as file:
        file.write(f"{lines[2]}\nOne sentence.\n{lines[3]}")
    return tmp_path


def expected_pairs(seed=0):
    settings = GapSettings(seed=seed)
    return [gap_example(document, settings) for document in DOCUMENTS]


def test_document_files(folder):
    source = DocumentFiles(train=f"{folder}/a*.txt*", test=f"{folder}/a2.txt.gz,{folder}/a1.txt")
    assert source.splits == ("train", "test")
    found = list(source.documents("train"))
    assert found == [*DOCUMENTS[:3], "One sentence.", DOCUMENTS[3]]
    assert list(source.documents("test")) == [*found[2:], *found[:2]]
    before = source.fingerprint("train")
    (folder / "a1.txt").write_text("Another.\n")
    assert source.fingerprint("train") != before


def test_a_file_whose_name_looks_like_a_pattern(tmp_path):
    (tmp_path / "a[1].txt").write_text("Brackets.\n")
    (tmp_path / "a1.txt").write_text("None.\n")
    named = DocumentFiles(train=f"{tmp_path}/a[1].txt")
    assert list(named.documents("train")) == ["Brackets."]
    (tmp_path / "a[1].txt").unlink()
    assert list(named.documents("train")) == ["None."]


def test_a_folder_whose_name_looks_like_a_pattern(tmp_path):
    for name in ("news[1]/a.txt", "news[1]/b.txt", "news1/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    literal = DocumentFiles(train=f"{tmp_path}/news[1]/*.txt")
    assert literal.files("train") == tuple(f"{tmp_path}/news[1]/{name}.txt" for name in "ab")
    assert DocumentFiles(train=f"{tmp_path}/news*/a.txt").files("train") == (
        f"{tmp_path}/news1/a.txt",
        f"{tmp_path}/news[1]/a.txt",
    )
    (tmp_path / "news[1]").rename(tmp_path / "moved")
    assert literal.files("train") == (f"{tmp_path}/news1/a.txt",)


def test_patterns_from_the_current_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert DocumentFiles(train="a*").files("train") == ("a1.txt", "a2.txt.gz")
    with pytest.raises(UserError, match=r"^--train_files=none/\*: there is no such file\.$"):
        DocumentFiles(train="none/*").files("train")


def test_other_rules_are_other_pairs(folder, monkeypatch):
    source = GapSource(DocumentFiles(train=f"{folder}/a*"))
    found = source.fingerprint("train")
    monkeypatch.setattr("tf_teaforn.data.documents.version", lambda name: f"{name} 9")
    assert source.fingerprint("train") == found.replace(
        f"sentencex-{version('sentencex')}", "sentencex-sentencex 9"
    )
    monkeypatch.setattr("tf_teaforn.data.documents.VERSION", 99)
    assert source.fingerprint("train").startswith("gaps-99:")


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("train", r"--train_files=.*/b\*: there is no such file\."),
        ("test", r"There are no documents for split 'test'\. Give --test_files=FILES, .*"),
        ("dev", r"A task on documents has no split 'dev'\. Write one of: train, .*"),
    ],
)
def test_no_documents(folder, split, message):
    source = GapSource(DocumentFiles(train=f"{folder}/b*"))
    with pytest.raises(UserError, match=message):
        source.dataset(split)


def test_pairs_are_those_of_each_document(folder, caplog):
    source = GapSource(DocumentFiles(train=f"{folder}/a*"))
    assert list(source.pairs("train")) == expected_pairs()
    assert (
        f"--train_files={folder}/a*: left out 1 of 5 documents: fewer than two sentences within "
        "--gap_max_words=512."
    ) in caplog.text
    texts = [(s.decode(), t.decode()) for s, t in source.dataset("train").as_numpy_iterator()]
    assert texts == expected_pairs()
    other = GapSource(DocumentFiles(train=f"{folder}/a*"), GapSettings(seed=1))
    assert other.fingerprint("train") != source.fingerprint("train")
    assert list(other.pairs("train")) == expected_pairs(seed=1)


def test_documents_without_a_pair(folder):
    source = GapSource(DocumentFiles(test=f"{folder}/a*"), GapSettings(max_words=2))
    message = (
        f"--test_files={folder}/a*: no document has two sentences within --gap_max_words=2. Raise "
        "it, or give longer documents."
    )
    with pytest.raises(UserError) as error:
        list(source.pairs("test"))
    assert str(error.value) == message
    with pytest.raises(tf.errors.OpError) as error:
        list(source.dataset("test").as_numpy_iterator())
    assert user_error_in(error.value) == message


def test_pairs_do_not_depend_on_the_number_of_processes(folder, monkeypatch):
    monkeypatch.setattr(documents, "_CHUNK", 2)
    text = "".join(f"Number {i} is here. So is number {i + 1}! It ends.\n" for i in range(9))
    (folder / "many.txt").write_text(text)
    source = DocumentFiles(train=f"{folder}/many.txt")
    one, two = (list(GapSource(source, workers=n).pairs("train")) for n in (1, 2))
    assert one == two == gap_examples(text.splitlines(), GapSettings())


def test_items_are_read_as_results_are_taken(monkeypatch):
    monkeypatch.setattr(documents, "_CHUNK", 2)
    read = []

    def items():
        for i in range(1000):
            read.append(i)
            yield i

    results = in_processes(sum, items(), workers=1)
    assert [next(results) for _ in range(3)] == [1, 5, 9]
    assert len(read) <= 6
    assert list(in_processes(sum, [], workers=2)) == []
    assert list(in_processes(sum, [7], workers=2)) == [7]


def test_an_error_in_another_process_comes_here(monkeypatch):
    monkeypatch.setattr(documents, "_CHUNK", 1)
    with pytest.raises(TypeError):
        list(in_processes(sum, ["a", "b", "c"], workers=2))


def test_tfds_documents(tmp_path):
    source = GapSource(TfdsDocuments("cnn_dailymail", "article", "article"))
    with tfds.testing.mock_data(num_examples=3):
        articles = [
            example["article"].decode()
            for example in tfds.load("cnn_dailymail", split="test").as_numpy_iterator()
        ]
        assert list(source.source.documents("test")) == articles
        assert source.splits == ("train", "validation", "test")
        source.dataset("test")
    elsewhere = with_data_dir(source, str(tmp_path))
    assert elsewhere.source.data_dir == str(tmp_path)
    assert isinstance(elsewhere.source, TfdsDocuments)
    with pytest.raises(UserError, match="is not prepared"):
        list(elsewhere.pairs("test"))
    with pytest.raises(UserError, match="--data_dir is for tasks that read TFDS"):
        with_data_dir(GapSource(DocumentFiles("a.txt")), str(tmp_path))


def test_prepared_pairs(tmp_path):
    source = PreparedSource(str(tmp_path))
    with pytest.raises(UserError, match="has no prepared.json: bin/prepare has not finished"):
        source.fingerprint("train")
    for name, lines in zip(shard_names("train", 2), ("a<n>b\tc\n", "d\te\n"), strict=True):
        with gzip.open(tmp_path / name, "wt") as file:
            file.write(lines)
    (tmp_path / "prepared.json").write_text(json.dumps({"splits": {"train": "x"}, "shards": 2}))
    assert source.splits == ("train",)
    pairs = list(source.dataset("train").as_numpy_iterator())
    assert pairs == [(b"a\nb", b"c"), (b"d", b"e")]
    before = source.fingerprint("train")
    (tmp_path / shard_names("train", 2)[0]).write_bytes(gzip.compress(b"x\ty\n"))
    assert source.fingerprint("train") != before


_KILLED = """
import itertools, os, signal, time
from tf_teaforn.data.documents import in_processes

def pid(items):
    return os.getpid()

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    workers = set()
    for worker in in_processes(pid, itertools.repeat("x"), workers=2):
        workers.add(worker)
        if len(workers) == 2:
            print(*workers, flush=True)
            time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_the_one_that_started_them(number, tmp_path):
    (tmp_path / "main.py").write_text(_KILLED)
    command = [sys.executable, str(tmp_path / "main.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        workers = process.stdout.readline().split()
        try:
            if number == signal.SIGINT:
                # As a terminal sends it. The first process alone is interrupted.
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            # The end of its output comes when no process has it open any more.
            _, errors = process.communicate(timeout=60)
            assert len(workers) == 2
            assert errors.count("Traceback") == (number == signal.SIGINT)
        finally:
            process.kill()
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(worker), signal.SIGKILL)

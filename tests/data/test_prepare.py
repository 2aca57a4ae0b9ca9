"""bin/prepare's pipeline: whole shards or none, the same whoever works."""

import functools
import gzip
import os
import re

import pytest

from tests.documents import DOCUMENTS
from tf_teaforn.data.documents import DocumentFiles, GapSource, PreparedSource, TfdsDocuments
from tf_teaforn.data.gaps import GapSettings, document_hash, gap_example
from tf_teaforn.errors import UserError

prepare = pytest.importorskip("tf_teaforn.data.prepare", exc_type=ModuleNotFoundError)
PipelineResult = pytest.importorskip("apache_beam.runners.runner").PipelineResult

OPTIONS = ["--runner=DirectRunner", prepare.WITHOUT_PRISM, "--direct_running_mode=in_memory"]
TEXTS = [*DOCUMENTS, *(f"Number {i} is one.\nIt is followed by number {i + 1}." for i in range(20))]
SHARDS = 5


@pytest.fixture
def source(tmp_path):
    lines = [text.replace("\n", "<n>") + "\n" for text in TEXTS]
    (tmp_path / "a.txt").write_text("".join(lines[:9]))
    (tmp_path / "b.txt").write_text("".join(lines[9:]) + "One sentence.\n")
    return GapSource(DocumentFiles(f"{tmp_path}/[ab].txt", f"{tmp_path}/a.txt"), GapSettings())


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shards(source, tmp_path, caplog):
    # No pattern.
    folder = tmp_path / "out[1]"
    written = prepare.prepare(source, str(folder), SHARDS, OPTIONS)
    assert len(written) == 2 * SHARDS
    warning = (
        rf"--train_files={tmp_path}/\[ab\].txt: left out 1 of {len(TEXTS) + 1} documents: fewer"
    )
    assert len(re.findall("left out", caplog.text)) == len(re.findall(warning, caplog.text)) == 1
    assert {*files(folder)} == {*written, "plan.json", "prepared.json"}
    for shard in range(SHARDS):
        texts = [text for text in TEXTS if document_hash(text, 0) % SHARDS == shard]
        pairs = [
            gap_example(t, GapSettings()) for t in sorted(texts, key=lambda t: document_hash(t, 0))
        ]
        lines = ["\t".join(side.replace("\n", "<n>") for side in pair) + "\n" for pair in pairs]
        content = gzip.decompress((folder / f"train-{shard:05d}-of-00005.tsv.gz").read_bytes())
        assert content.decode() == "".join(lines)
    read = [
        (s.decode(), t.decode())
        for s, t in PreparedSource(str(folder)).dataset("train").as_numpy_iterator()
    ]
    assert sorted(read) == sorted(source.pairs("train"))

    # Everything is there already.
    before = files(folder)
    assert prepare.prepare(source, str(folder), SHARDS, OPTIONS) == []
    # What a killed run leaves: shards that are whole, and a file written halfway.
    (folder / "prepared.json").unlink()
    lost = ["train-00001-of-00005.tsv.gz", "validation-00004-of-00005.tsv.gz"]
    for name in lost:
        (folder / name).unlink()
    (folder / f"{lost[0]}.5c.partial").write_bytes(b"half")
    # And what a power cut leaves of a file that was not flushed.
    lost.insert(1, "train-00003-of-00005.tsv.gz")
    (folder / lost[1]).write_bytes(b"")
    assert prepare.prepare(source, str(folder), SHARDS, OPTIONS) == lost
    assert files(folder) == before

    with pytest.raises(UserError, match="was begun with other documents, settings or --shards"):
        prepare.prepare(source, str(folder), 4, OPTIONS)
    assert files(folder) == before


def test_a_shard_is_flushed_before_it_has_its_name(tmp_path, monkeypatch):
    flushed = []

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        flushed.append((gzip.decompress(open(path, "rb").read()), os.listdir(tmp_path)))

    monkeypatch.setattr("os.fsync", fsync)
    prepare._write_shard((1, [(2, "c", "d"), None, (1, "a\nb", "e")]), str(tmp_path), ["x", "y"])
    ((content, names),) = flushed
    assert content == b"a<n>b\te\nc\td\n" and "y" not in names
    assert os.listdir(tmp_path) == ["y"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--runner=Foo", r"Unexpected pipeline runner: Foo\. Valid values are DataflowRunner, .*"),
        ("--runner=none.Runner", "No module named 'none'"),
        ("--runner=gzip.Runner", "module 'gzip' has no attribute 'Runner'"),
        ("--direct_num_workers=x", "argument --direct_num_workers: invalid int value: 'x'"),
    ],
)
def test_options_that_beam_does_not_take(source, tmp_path, capsys, option, message):
    with pytest.raises(UserError, match=rf"^{message}\. Check --runner and --beam_options\.$"):
        prepare.prepare(source, str(tmp_path / "out"), SHARDS, [*OPTIONS, option])
    assert not (tmp_path / "out").exists()
    assert capsys.readouterr().err == ""


def test_a_runner_whose_package_is_missing(source, tmp_path, monkeypatch):
    def run(*_, **__):
        # That of Dataflow's.
        raise ImportError("runner not available, please install apache_beam[gcp]")

    monkeypatch.setattr(prepare.beam.Pipeline, "run", run)
    with pytest.raises(UserError) as error:
        prepare.prepare(source, str(tmp_path / "out"), SHARDS, OPTIONS)
    assert str(error.value) == (
        "runner not available, please install apache_beam[gcp]. Check --runner and --beam_options."
    )


def test_a_runner_that_does_not_count(source, tmp_path, monkeypatch):
    class Uncounted(prepare.beam.Pipeline):
        def run(self, *args, **kwargs):
            result = super().run(*args, **kwargs)
            # That of a runner without metrics.
            result.metrics = functools.partial(PipelineResult.metrics, result)
            return result

    counted, folder = tmp_path / "counted", tmp_path / "out"
    prepare.prepare(source, str(counted), SHARDS, OPTIONS)
    monkeypatch.setattr(prepare.beam, "Pipeline", Uncounted)
    assert len(prepare.prepare(source, str(folder), SHARDS, OPTIONS)) == 2 * SHARDS
    assert files(folder) == files(counted)
    (tmp_path / "a.txt").write_text("One sentence.\n")
    with pytest.raises(UserError, match="no document has two sentences"):
        prepare.prepare(source, str(tmp_path / "none"), SHARDS, OPTIONS)
    assert not (tmp_path / "none" / "prepared.json").exists()


def test_documents_without_a_pair(source, tmp_path):
    (tmp_path / "a.txt").write_text("One sentence.\n")
    folder = tmp_path / "out"
    # The second time those of training are there.
    for _ in range(2):
        with pytest.raises(UserError) as error:
            prepare.prepare(source, str(folder), SHARDS, OPTIONS)
        assert str(error.value) == (
            f"--valid_files={tmp_path}/a.txt: no document has two sentences within "
            "--gap_max_words=512. Raise it, or give longer documents."
        )
        assert not (folder / "prepared.json").exists()
    assert len(list(folder.glob("*.gz"))) == SHARDS


def test_what_was_refused_can_be_mended(source, tmp_path):
    """Where no shard was written, other documents and settings are no other run."""
    folder, path = tmp_path / "out", tmp_path / "b.txt"
    lines = path.read_bytes()
    path.write_bytes(lines + b"latin \xe9.\n")
    for _ in range(2):
        with pytest.raises(UserError, match="is not UTF-8. Convert the file"):
            prepare.prepare(source, str(folder), SHARDS, OPTIONS)
        assert files(folder).keys() == {"plan.json"}
    path.write_bytes(lines)
    assert len(prepare.prepare(source, str(folder), SHARDS, OPTIONS)) == 2 * SHARDS


def test_more_words_where_no_document_had_a_pair(tmp_path):
    (tmp_path / "a.txt").write_text("".join(t.replace("\n", "<n>") + "\n" for t in DOCUMENTS))
    few, more = (
        GapSource(DocumentFiles(f"{tmp_path}/a.txt"), GapSettings(max_words=words))
        for words in (2, 512)
    )
    with pytest.raises(UserError, match="--gap_max_words=2. Raise it"):
        prepare.prepare(few, str(tmp_path / "out"), SHARDS, OPTIONS)
    assert len(prepare.prepare(more, str(tmp_path / "out"), SHARDS, OPTIONS)) == SHARDS


def test_data_that_are_not_prepared_leave_nothing_behind(tmp_path):
    source = GapSource(TfdsDocuments("gigaword", "document", "document", data_dir=str(tmp_path)))
    with pytest.raises(UserError, match=r"^gigaword \(split train\) is not prepared"):
        prepare.prepare(source, str(tmp_path / "out"), SHARDS, OPTIONS)
    assert not (tmp_path / "out").exists()


def test_a_failing_run_leaves_no_shard_and_no_manifest(source, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    monkeypatch.setattr(prepare, "gap_example", lambda *_: 1 / 0)
    with pytest.raises(Exception, match="division by zero"):
        prepare.prepare(source, str(folder), SHARDS, OPTIONS)
    assert {*files(folder)} == {"plan.json"}
    monkeypatch.undo()
    monkeypatch.setattr(prepare.gzip, "GzipFile", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(Exception, match="division by zero"):
        prepare.prepare(source, str(folder), SHARDS, OPTIONS)
    names = {*files(folder)}
    assert "prepared.json" not in names and not any(name.endswith(".gz") for name in names)


def test_a_document_that_is_no_text(source, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"It is here. It was.\nCaf\xe9 one. Two.\n")
    with pytest.raises(UserError) as error:
        prepare.prepare(source, str(tmp_path / "out"), 1, OPTIONS)
    message = r".*/a\.txt:2: byte 4 of the line \(0xe9\) is not UTF-8\. Convert the file, .*\."
    assert re.fullmatch(message, str(error.value))


@pytest.mark.slow
def test_the_files_do_not_depend_on_the_workers(source, tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    prepare.prepare(source, str(folders[0]), SHARDS, OPTIONS)
    processes = [*OPTIONS[:2], "--direct_num_workers=2", "--direct_running_mode=multi_processing"]
    prepare.prepare(source, str(folders[1]), SHARDS, processes)
    one, two = map(files, folders)
    assert one == two

"""Sources against files written here byte by byte, and a TFDS data set prepared on disk."""

import gzip
import os
import shlex
import tracemalloc
from unittest import mock

import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from etils import epath
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tf_teaforn.data import sources
from tf_teaforn.data.documents import DocumentFiles, GapSource, TfdsDocuments
from tf_teaforn.data.gaps import GapSettings
from tf_teaforn.data.sources import GeneratedSource, TextSource, TfdsSource, with_data_dir
from tf_teaforn.errors import UserError


def _read(source, split):
    return [(a.decode(), b.decode()) for a, b in source.dataset(split).as_numpy_iterator()]


def _write(path, content):
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def _error(call):
    with pytest.raises(UserError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message
    return message


# Text files: what is read.


@pytest.mark.parametrize("name", ["pairs.tsv", "pairs.tsv.gz"])
def test_tsv(tmp_path, name):
    path = _write(tmp_path / name, "one cat\tun chat\ntwo\tdeux été\n".encode())
    source = TextSource(train=path, validation=path)
    assert source.splits == ("train", "validation")
    expected = [("one cat", "un chat"), ("two", "deux été")]
    assert _read(source, "train") == _read(source, "validation") == expected
    dataset = source.dataset("train")
    assert dataset.cardinality() == 2
    assert [(spec.shape.rank, spec.dtype.name) for spec in dataset.element_spec] == [
        (0, "string"),
        (0, "string"),
    ]


def test_parallel_files_one_of_them_zipped(tmp_path):
    english = _write(tmp_path / "x.en.gz", b"one\ntwo\twith tab\n")
    french = _write(tmp_path / "x.fr", b"un\ndeux")  # No end of line at the end of the file.
    assert _read(TextSource(test=f"{english},{french}"), "test") == [
        ("one", "un"),
        ("two\twith tab", "deux"),
    ]


def test_gzip_of_several_members(tmp_path):
    path = tmp_path / "x.tsv.gz"
    path.write_bytes(gzip.compress(b"a\tb\nc") + gzip.compress(b"\td\n"))
    assert _read(TextSource(test=str(path)), "test") == [("a", "b"), ("c", "d")]


def test_byte_order_mark_and_carriage_returns_are_dropped(tmp_path):
    path = _write(tmp_path / "x.tsv", b"\xef\xbb\xbfa\tb\r\nc\rd\te\r\r\nf\t\xef\xbb\xbfg")
    assert _read(TextSource(test=path), "test") == [("a", "b"), ("c\rd", "e\r"), ("f", "\ufeffg")]


def test_a_byte_order_mark_in_each_parallel_file(tmp_path):
    files = [_write(tmp_path / name, b"\xef\xbb\xbf" + name.encode()) for name in ("a", "b")]
    assert _read(TextSource(test=",".join(files)), "test") == [("a", "b")]


def test_only_newline_ends_a_line(tmp_path):
    separators = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"
    path = _write(tmp_path / "x.tsv", f"a{separators}b\tc{separators}\n".encode())
    assert _read(TextSource(test=path), "test") == [(f"a{separators}b", f"c{separators}")]


def test_newline_mark_is_read_as_newline(tmp_path):
    path = _write(tmp_path / "x.tsv", b"one<n>two\tun<n>deux<n>\n")
    assert _read(TextSource(test=path), "test") == [("one\ntwo", "un\ndeux\n")]


_sides = st.text(st.characters(blacklist_characters="\n\t\0\r\ufeff", codec="utf-8"), max_size=8)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(pairs=st.lists(st.tuples(_sides, _sides), min_size=1, max_size=6), two=st.booleans())
def test_any_text_comes_back(tmp_path, pairs, two):
    if not all(any(side.strip() for side in sides) for sides in zip(*pairs, strict=True)):
        pairs = [*pairs, ("text", "text")]
    names = ("x.src", "x.tgt") if two else ("x.tsv",)
    lines = [list(sides) for sides in zip(*pairs, strict=True)] if two else [map("\t".join, pairs)]
    files = [
        _write(tmp_path / name, "\n".join([*column, ""]).encode())
        for name, column in zip(names, lines, strict=True)
    ]
    expected = [tuple(side.replace("<n>", "\n") for side in pair) for pair in pairs]
    sources._count_pairs.cache_clear()  # Files of one size may be written within one clock tick.
    source = TextSource(train=",".join(files), test=",".join(files))
    assert _read(source, "test") == expected
    kept = [pair for pair in expected if pair[0].strip() and pair[1].strip()]
    if kept:
        assert _read(source, "train") == kept


def test_blank_sides_are_left_out_of_training_only(tmp_path, caplog):
    lines = b"a\tb\n\tc\nd\t\n\t\n \te\n\xc2\xa0\tf\n<n>\tg\nh\ti\n"
    path = _write(tmp_path / "x.tsv", lines)
    source = TextSource(train=path, validation=path, test=path)
    with caplog.at_level("WARNING", logger="tf_teaforn"):
        assert _read(source, "train") == [("a", "b"), ("h", "i")]
    assert f"{path}: left out 6 of 8 pairs" in caplog.text
    assert source.dataset("train").cardinality() == 2
    everything = [
        ("a", "b"),
        ("", "c"),
        ("d", ""),
        ("", ""),
        (" ", "e"),
        ("\xa0", "f"),
        ("\n", "g"),
        ("h", "i"),
    ]
    assert _read(source, "validation") == _read(source, "test") == everything


def test_no_warning_where_nothing_is_left_out(tmp_path, caplog):
    path = _write(tmp_path / "x.tsv", b"a\tb\n")
    with caplog.at_level("WARNING", logger="tf_teaforn"):
        TextSource(train=path).dataset("train")
    assert not caplog.records


def test_large_files_are_streamed(tmp_path):
    line = b"word " * 20 + b"\t" + b"mot " * 20 + b"\n"
    path = _write(tmp_path / "x.tsv", line * 50_000)  # 9 MB
    source = TextSource(train=path)
    source.dataset("train")
    sources._count_pairs.cache_clear()
    tracemalloc.start()
    try:
        source.dataset("train")
        count = sum(1 for _ in sources.read_pairs((path,), drop_blank=True))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 50_000
    assert peak < 1_000_000
    assert sum(1 for _ in source.dataset("train").batch(1000)) == 50


# Text files: what is refused, by file and line.


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", ": the file is empty."),
        (b"\n\n \n", ": the source side has only blank lines."),
        (b"\xef\xbb\xbf", ": the source side has only blank lines."),
        (b"a\t\nb\t \n", ": the target side has only blank lines."),
        (b"a\tb\nc d\n", ":2: 0 tabs. Write source<TAB>target, with exactly one tab."),
        (b"a\tb\tc\n", ":1: 2 tabs. Write source<TAB>target, with exactly one tab."),
        (b"a\tb\n\nc\td\n", ":2: a blank line. Write source<TAB>target, with exactly one tab."),
        (
            b"a\tb\nc\td \xff\n",
            ":2: byte 5 of the line (0xff) is not UTF-8. Convert the file, with iconv for example.",
        ),
        (b"a\tb\n\n\xe9t\xe9\tc\n", ":3: byte 1 of the line (0xe9) is not UTF-8."),
        (b"a\tb\xed\xa0\x80\n", ":1: byte 4 of the line (0xed) is not UTF-8."),  # A surrogate.
        (b"a\tb\nc\0d\te\n", ":2: byte 2 of the line is NUL. Is this a file of UTF-8 text?"),
    ],
)
@pytest.mark.parametrize("name", ["x.tsv", "x.tsv.gz"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_bad_tsv(tmp_path, content, expected, name, split):
    path = _write(tmp_path / name, content)
    message = _error(lambda: TextSource(**{split: path}).dataset(split))
    assert message.startswith(path + expected)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (
            b"a\nb\nc\n",
            b"a\nb\n",
            "{0} has 3 lines and {1} has 2. Line i of one must be the translation of line i of the "
            "other.",
        ),
        (b"a\nb", b"a\nb\n\n", "{0} has 2 lines and {1} has 3."),
        (b"a\n", b"", "{1}: the file is empty."),
        (b"\n \n", b"a\nb\n", "{0}: the source side has only blank lines."),
        (b"a\nb\n", b"\n\n", "{1}: the target side has only blank lines."),
        (b"a\nb\n", b"c\nd\xc3\n", "{1}:2: byte 2 of the line (0xc3) is not UTF-8."),
        (b"a\n\0\n", b"c\nd\n", "{0}:2: byte 1 of the line is NUL."),
    ],
)
def test_bad_parallel_files(tmp_path, source, target, expected):
    files = [_write(tmp_path / "x.en", source), _write(tmp_path / "x.fr", target)]
    message = _error(lambda: TextSource(validation=",".join(files)).dataset("validation"))
    assert message.startswith(expected.format(*files))


def test_nothing_to_train_on(tmp_path):
    path = _write(tmp_path / "x.tsv", b"a\t\n\tb\n")
    message = _error(lambda: TextSource(train=path).dataset("train"))
    assert message == f"{path}: one side of every pair is blank. Check the files."
    assert _read(TextSource(test=path), "test") == [("a", ""), ("", "b")]


def test_missing_file(tmp_path):
    source = TextSource(train=str(tmp_path / "none.tsv"), test=f"{tmp_path}/none.en,{__file__}")
    for call in (source.dataset, source.fingerprint):
        message = _error(lambda call=call: call("train"))
        assert message == f"{tmp_path}/none.tsv: no such file. Check --train_files."
        message = _error(lambda call=call: call("test"))
        assert message == f"{tmp_path}/none.en: no such file. Check --test_files."


def test_a_pipe(tmp_path):
    """What a shell's <(...) names: a second reader would find nothing, and wait."""
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    for source in (TextSource(train=path), GapSource(DocumentFiles(train=path), GapSettings())):
        message = _error(lambda source=source: source.fingerprint("train"))
        assert message.startswith(f"{path}: a pipe can be read once only, data are read several")
    assert "a pipe can be read once only" in _error(lambda: TextSource(path).dataset("train"))


def test_directory(tmp_path):
    message = _error(lambda: TextSource(train=str(tmp_path)).dataset("train"))
    assert message == f"{tmp_path}: cannot be read: Is a directory."


@pytest.mark.parametrize(
    "content",
    [b"a\tb\n", gzip.compress(b"a\tb\n" * 100)[:-9], gzip.compress(b"a\tb\n")[:12]],
    # The bytes hold the time.
    ids=["plain", "no_end", "no_middle"],
)
def test_broken_gzip(tmp_path, content):
    path = tmp_path / "x.tsv.gz"
    path.write_bytes(content)
    message = _error(lambda: TextSource(train=str(path)).dataset("train"))
    assert message.startswith(f"{path}: not a whole gzip file: ")


@pytest.mark.parametrize("value", ["a,b,c", "a,", ",b"])
def test_neither_one_file_nor_two(value):
    assert _error(lambda: TextSource(validation=value)) == (
        f"--valid_files={value} is neither one file nor two. Write one TSV file, or SOURCE,TARGET."
    )


def test_split_without_files():
    assert TextSource().splits == ()
    assert _error(lambda: TextSource(train="x").dataset("test")) == (
        "There are no files for split 'test'. Give --test_files=one TSV file (source<TAB>target a "
        "line), or SOURCE,TARGET."
    )
    assert _error(lambda: TextSource(train="x").fingerprint("dev")) == (
        "A text task has no split 'dev'. Write one of: train, validation, test."
    )


def test_fingerprint_of_files(tmp_path):
    path = _write(tmp_path / "x.tsv", b"a\tb\n")
    source = TextSource(train=path, test=path)
    first = source.fingerprint("train")
    assert source.fingerprint("train") == first
    assert source.fingerprint("test") != first
    stat = os.stat(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    touched = source.fingerprint("train")
    assert touched != first
    (tmp_path / "x.tsv").write_bytes(b"a\tbc\n")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert source.fingerprint("train") not in (first, touched)


def test_changed_files_are_checked_again(tmp_path):
    path = _write(tmp_path / "x.tsv", b"a\tb\n")
    source = TextSource(test=path)
    assert _read(source, "test") == [("a", "b")]
    _write(tmp_path / "x.tsv", b"a\tb\nc\n")
    assert _error(lambda: source.dataset("test")).startswith(f"{path}:2: 0 tabs.")


def test_lines_longer_than_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_BLOCK", 4)
    path = _write(tmp_path / "x.tsv", b"a long line\tfollowed\r\nby\tothers\n1\t2")
    assert _read(TextSource(test=path), "test") == [
        ("a long line", "followed"),
        ("by", "others"),
        ("1", "2"),
    ]


@pytest.mark.parametrize("name", ["x.tsv", "x.tsv.gz"])
def test_remote_files(tmp_path, monkeypatch, name):
    """A bucket, played by a directory read through TensorFlow's file system as buckets are."""
    _write(tmp_path / name, b"a\rb\tc\r\nd\te\n")
    modified = [0]

    class Bucket:
        def __init__(self, path):
            self.path = path.replace("gs://bucket", str(tmp_path))

        def exists(self):
            return os.path.exists(self.path)

        def open(self, mode):
            return tf.io.gfile.GFile(self.path, mode)

        def stat(self):
            return epath.stat_utils.StatResult(False, os.path.getsize(self.path), modified[0])

    monkeypatch.setattr(epath, "Path", Bucket)
    source = TextSource(test=f"gs://bucket/{name}", validation="gs://bucket/none")
    assert _read(source, "test") == [("a\rb", "c"), ("d", "e")]
    first = source.fingerprint("test")
    assert str(os.path.getsize(tmp_path / name)) in first
    modified[0] = 1
    assert source.fingerprint("test") != first
    assert _error(lambda: source.dataset("validation")) == (
        "gs://bucket/none: no such file. Check --valid_files."
    )


def test_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    _write(tmp_path / "x.en", b"a\n")
    _write(tmp_path / "x.fr", b"b\n")
    assert _read(TextSource(test="~/x.en,~/x.fr"), "test") == [("a", "b")]


# Functions.


def _squares(split):
    start = {"train": 0, "validation": 5_000, "test": 10_000}[split]
    return ((f"{n} 🙂\n", f"{n * n}") for n in range(start, start + 5_000))


def test_generated_pairs_in_order_and_again():
    source = GeneratedSource(_squares, version="1")
    assert source.splits == ("train", "validation", "test")
    for split in ("train", "test"):
        assert _read(source, split) == list(_squares(split))
    dataset = source.dataset("validation").take(1)
    assert list(dataset.as_numpy_iterator()) == list(dataset.as_numpy_iterator())


def test_generated_fingerprint():
    one, two = GeneratedSource(_squares, "1"), GeneratedSource(_squares, "2")
    other = GeneratedSource(_read, "1")
    names = [one.fingerprint("train"), one.fingerprint("test"), two.fingerprint("train")]
    assert len({*names, other.fingerprint("train")}) == 4
    assert GeneratedSource(_squares, "1").fingerprint("train") == names[0]


def test_generated_split():
    for call in (
        GeneratedSource(_squares, "1").dataset,
        GeneratedSource(_squares, "1").fingerprint,
    ):
        assert _error(lambda call=call: call("dev")) == (
            "This task has no split 'dev'. Write one of: train, validation, test."
        )


# TensorFlow Datasets.

_PAIRS = {
    "train": [("one cat", "un chat"), ("line\nbreak", "à la\nligne"), ("three", "trois")],
    "validation": [("four", "quatre")],
    "test": [("five", "cinq"), ("six", "six")],
}


class TinyTranslate(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Built here and found from its files alone, as a user's own data set is."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="fr-en", description="French and English")]
    pairs = _PAIRS

    def _info(self):
        features = tfds.features.Translation(languages=("fr", "en"))
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(pairs) for split, pairs in self.pairs.items()}

    def _generate_examples(self, pairs):
        for index, (english, french) in enumerate(pairs):
            yield index, {"en": english, "fr": french}


def _prepare(directory, builder_class=TinyTranslate):
    builder = builder_class(config="fr-en", data_dir=directory)
    offline = tfds.download.DownloadConfig(try_download_gcs=False)
    builder.download_and_prepare(download_config=offline)
    return str(directory)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return _prepare(tmp_path_factory.mktemp("tfds"))


def _tiny(data_dir, **settings):
    return TfdsSource("tiny_translate/fr-en", "en", "fr", data_dir=data_dir, **settings)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_tfds_from_disk(data_dir, split):
    source = _tiny(data_dir)
    assert source.splits == ("train", "validation", "test")
    first = _read(source, split)
    assert sorted(first) == sorted(_PAIRS[split])  # TFDS shuffles once, when it prepares.
    assert _read(source, split) == first
    assert source.dataset(split).cardinality() == len(_PAIRS[split])


def test_tfds_the_other_way_round(data_dir):
    source = TfdsSource("tiny_translate/fr-en", "fr", "en", data_dir=data_dir)
    assert _read(source, "validation") == [("quatre", "four")]


def test_tfds_slices(data_dir):
    splits = {"train": "train[:2]", "validation": "train[2:]", "both": "validation+test"}
    source = _tiny(data_dir, tfds_splits=splits)
    assert source.splits == ("train", "validation", "both")
    assert len(_read(source, "train")) == 2
    assert sorted(_read(source, "train") + _read(source, "validation")) == sorted(_PAIRS["train"])
    assert sorted(_read(source, "both")) == sorted(_PAIRS["validation"] + _PAIRS["test"])


def _upper(source, target):
    return tf.strings.upper(source), target


def test_tfds_preprocess(data_dir):
    source = _tiny(data_dir, preprocess=_upper)
    assert _read(source, "validation") == [("FOUR", "quatre")]


def test_with_data_dir(data_dir):
    source = with_data_dir(_tiny(None), data_dir)
    assert source == _tiny(data_dir)
    assert with_data_dir(source, None) is with_data_dir(source, "") is source
    for other in (TextSource(train="x"), GeneratedSource(_squares, "1")):
        assert with_data_dir(other, None) is other
        message = _error(lambda other=other: with_data_dir(other, data_dir))
        assert message.startswith("--data_dir is for tasks that read TFDS")


def test_tfds_not_prepared(tmp_path):
    source = TfdsSource("gigaword", "document", "summary", data_dir=str(tmp_path))
    message = _error(lambda: source.dataset("train"))
    assert message.startswith(
        f"gigaword (split train) is not prepared: {tmp_path}/gigaword/1.2.0 does not exist. Run, "
        "where there is a network, `python -c "
    )
    assert message.endswith("`, or name the directory that holds it with --data_dir=DIR.")
    assert _prepared_by(message) == f"{tmp_path}/gigaword/1.2.0"


def test_tfds_not_prepared_in_the_default_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
    message = _error(lambda: TfdsSource("wmt14_translate/fr-en", "en", "fr").dataset("validation"))
    directory = f"{tmp_path}/wmt14_translate/fr-en/1.0.0"
    assert message.startswith(
        f"wmt14_translate/fr-en (split validation) is not prepared: {directory} does not exist. "
    )
    assert _prepared_by(message) == directory


def _prepared_by(message):
    """The directory that the command in a message would fill."""
    python, option, code = shlex.split(message.split("`")[1])
    assert (python, option) == ("python", "-c")
    prepare = mock.create_autospec(tfds.core.DatasetBuilder.download_and_prepare)
    with mock.patch.object(tfds.core.DatasetBuilder, "download_and_prepare", prepare):
        exec(code, {})
    return prepare.call_args.args[0].data_dir


def test_tfds_unknown_name(tmp_path):
    message = _error(lambda: _tiny(str(tmp_path)).fingerprint("train"))
    assert message.startswith(f"TFDS cannot open tiny_translate/fr-en in {tmp_path}: ")
    assert message.endswith("Name the directory that holds it with --data_dir=DIR.")


def test_tfds_unknown_config(tmp_path):
    source = TfdsSource("wmt14_translate/en-xx", "en", "xx", data_dir=str(tmp_path))
    assert "en-xx not found" in _error(lambda: source.dataset("train"))


def test_tfds_wrong_split(data_dir):
    assert _error(lambda: _tiny(data_dir).dataset("dev")) == (
        "tiny_translate/fr-en has no split 'dev'. Write one of: train, validation, test."
    )
    source = _tiny(data_dir, tfds_splits={"train": "train", "validation": "dev[:10%]"})
    for call in (source.dataset, source.fingerprint):
        assert _error(lambda call=call: call("validation")) == (
            f"tiny_translate/fr-en/1.0.0 in {data_dir}/tiny_translate/fr-en/1.0.0 has no TFDS "
            "split 'dev[:10%]'. It has: train, validation, test."
        )
    for wanted, reason in (
        ("train[:99]", "Requested slice [:99] incompatible with 3 examples"),
        ("all[:50%]", "does not support slice"),
        ("train[:150%]", "boundaries should be in"),
        ("train+validation[:99]", "Requested slice [:99] incompatible with 1 examples"),
        ("train[3:]", "It has no example"),
    ):
        source = _tiny(data_dir, tfds_splits={"train": wanted})
        message = _error(lambda source=source: source.dataset("train"))
        assert f": {wanted!r} cannot be read: " in message and reason in message
        assert "\n" not in message


def test_tfds_wrong_feature(data_dir):
    source = TfdsSource("tiny_translate/fr-en", "en", "de", data_dir=data_dir)
    assert _error(lambda: source.dataset("train")) == (
        "tiny_translate/fr-en/1.0.0 has no text feature 'de'. Write as source_key and "
        "target_key: en, fr."
    )


def test_tfds_feature_that_is_no_text():
    with tfds.testing.mock_data(num_examples=1):
        message = _error(lambda: TfdsDocuments("imdb_reviews", "label", "label").dataset("train"))
        assert message == (
            "imdb_reviews/plain_text/1.0.0 has no text feature 'label'. Write as --tfds_feature: "
            "text."
        )
        message = _error(lambda: TfdsSource("mnist", "image", "label").fingerprint("train"))
        assert message == (
            "mnist/3.0.1 has no text feature 'image'. Write as source_key and target_key: another "
            "data set, as it has none."
        )


class MoreTranslate(TinyTranslate, skip_registration=True):
    name = "tiny_translate"
    pairs = {**_PAIRS, "train": [*_PAIRS["train"], ("seven", "sept")]}


def test_tfds_fingerprint(data_dir, tmp_path):
    source = _tiny(data_dir)
    first = source.fingerprint("train")
    assert _tiny(data_dir).fingerprint("train") == first
    others = [
        source.fingerprint("test"),
        _tiny(data_dir, preprocess=_upper).fingerprint("train"),
        _tiny(data_dir, tfds_splits={"train": "train[:2]"}).fingerprint("train"),
        TfdsSource("tiny_translate/fr-en", "fr", "en", data_dir=data_dir).fingerprint("train"),
        _tiny(_prepare(tmp_path, MoreTranslate)).fingerprint("train"),
    ]
    assert len({first, *others}) == 6

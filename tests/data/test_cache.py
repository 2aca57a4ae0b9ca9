import concurrent.futures
import json
import shutil

import numpy as np
import pytest
import tensorflow as tf

from tf_teaforn.data.cache import TokenRows, build_or_load
from tf_teaforn.data.tokenizer import Tokenizer, train_sentencepiece
from tf_teaforn.errors import UserError

PAIRS = [
    ("5 6 7", "8 9"),
    ("5 6 7 8", "9"),
    ("", "10 11 12 13 14 15"),
    ("65535", ""),
    ("5 6 7 8 9", "10 11 12"),
]
# With at most 4 source and 6 target ids, EOS included.
KEPT = [([5, 6, 7, 1], [8, 9, 1]), ([65535, 1], [1])]
TRUNCATED = [
    ([5, 6, 7, 1], [8, 9, 1]),
    ([5, 6, 7, 1], [9, 1]),
    ([1], [10, 11, 12, 13, 14, 1]),
    ([65535, 1], [1]),
    ([5, 6, 7, 1], [10, 11, 12, 1]),
]


class Numbers:
    """Stands in for a tokenizer: texts are ids, written in figures."""

    def __init__(self, vocabulary_size=65536, fingerprint="numbers"):
        self.vocabulary_size = vocabulary_size
        self.fingerprint = fingerprint

    @property
    def targets(self):
        return self

    def tokenize(self, strings):
        return tf.strings.to_number(tf.strings.split(strings), tf.int32)


class Pairs:
    """Stands in for a source; counts how often it is read."""

    def __init__(self, pairs=PAIRS, version="1"):
        self.pairs = pairs
        self.version = version
        self.reads = 0

    def dataset(self, split):
        self.reads += 1
        sources, targets = zip(*self.pairs, strict=True) if self.pairs else ([], [])
        texts = tf.constant(sources, tf.string), tf.constant(targets, tf.string)
        return tf.data.Dataset.from_tensor_slices(texts)

    def fingerprint(self, split):
        return f"{self.version}:{split}"


def build(directory, source=None, drop_long=False, tokenizer=None, split="validation"):
    return build_or_load(
        directory, source or Pairs(), split, tokenizer or Numbers(), 4, 6, drop_long
    )


def rows(cache):
    return [(cache.source(i).tolist(), cache.target(i).tolist()) for i in range(len(cache))]


def test_training_drops_what_is_too_long(tmp_path, caplog):
    cache = build(tmp_path, drop_long=True)
    assert rows(cache) == KEPT
    assert cache.too_long == 3
    assert "3 of 5 examples (60.00%) are longer than 4 source or 6 target" in caplog.text
    assert "dropped" in caplog.text


def test_evaluation_truncates_before_eos(tmp_path, caplog):
    cache = build(tmp_path, drop_long=False)
    assert rows(cache) == TRUNCATED
    assert cache.too_long == 3
    assert "3 of 5 examples" in caplog.text
    assert "truncated" in caplog.text


def test_lengths_count_eos(tmp_path):
    cache = build(tmp_path)
    assert cache.source_lengths.tolist() == [4, 4, 1, 2, 4]
    assert cache.target_lengths.tolist() == [3, 2, 6, 1, 4]
    assert cache.source_lengths.dtype == np.int32
    assert (cache.max_source_length, cache.max_target_length) == (4, 6)


@pytest.mark.parametrize("vocabulary_size, dtype", [(65536, np.uint16), (65537, np.int32)])
def test_ids_are_stored_small(tmp_path, vocabulary_size, dtype):
    cache = build(tmp_path, tokenizer=Numbers(vocabulary_size))
    assert cache.sources.ids.dtype == dtype
    assert cache.source(3).dtype == np.int32
    assert rows(cache) == TRUNCATED


def test_large_ids(tmp_path):
    source = Pairs([("65536 1000000", "70000")])
    assert rows(build(tmp_path, source, tokenizer=Numbers(10**6 + 1))) == [
        ([65536, 1000000, 1], [70000, 1])
    ]


def test_many_examples_keep_their_order(tmp_path):
    source = Pairs([(f"{i + 5}", f"{i + 6} {i + 7}") for i in range(5000)])
    cache = build(tmp_path, source)
    assert rows(cache) == [([i + 5, 1], [i + 6, i + 7, 1]) for i in range(5000)]


def test_second_time_nothing_is_read(tmp_path, caplog):
    source = Pairs()
    first = build(tmp_path, source)
    caplog.clear()
    second = build(tmp_path, source)
    assert source.reads == 1
    assert rows(second) == rows(first)
    assert "3 of 5 examples" in caplog.text
    assert not second.sources.ids.flags.writeable


def test_a_cache_serves_only_what_it_was_built_for(tmp_path):
    source = Pairs()
    build(tmp_path, source)
    build(tmp_path, source, drop_long=True)
    build(tmp_path, source, split="test[:50%]/x")
    build(tmp_path, source, tokenizer=Numbers(fingerprint="other"))
    build_or_load(tmp_path, source, "validation", Numbers(), 5, 6, False)
    build_or_load(tmp_path, source, "validation", Numbers(), 4, 7, False)
    source.version = "2"
    build(tmp_path, source)
    assert source.reads == 7
    source.version = "1"
    build(tmp_path, source)
    assert source.reads == 7


def truncate(path):
    path.write_bytes(path.read_bytes()[:-2])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0\0")


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove(path):
    path.unlink()


@pytest.mark.parametrize(
    "name, damage",
    [
        ("source.ids", flip_bit),
        ("source.offsets", flip_bit),
        ("target.ids", flip_bit),
        ("target.offsets", flip_bit),
        ("manifest.json", flip_bit),
        ("target.ids", truncate),
        ("source.offsets", truncate),
        ("manifest.json", truncate),
        ("source.ids", lengthen),
        ("target.offsets", remove),
        ("manifest.json", remove),
    ],
)
def test_a_damaged_cache_is_built_anew(tmp_path, caplog, name, damage):
    source = Pairs()
    build(tmp_path, source)
    [path] = tmp_path.glob(f"*/{name}")
    damage(path)
    assert rows(build(tmp_path, source)) == TRUNCATED
    assert source.reads == 2
    assert f"{path.parent} is damaged" in caplog.text
    build(tmp_path, source)
    assert source.reads == 2


def test_the_digest_is_that_of_the_examples(tmp_path):
    digest = build(tmp_path).digest
    assert len(digest) == 16
    assert build(tmp_path).digest == build(tmp_path, Pairs(version="2")).digest == digest
    others = [PAIRS[:-1], PAIRS[::-1], [("5 6 7", "8 10"), *PAIRS[1:]]]
    # Moved to the example before: the same ids.
    others.append([("5 6", "8 9"), ("7 5 6", "9"), *PAIRS[2:]])
    found = [build(tmp_path / str(i), Pairs(pairs)).digest for i, pairs in enumerate(others)]
    assert len({digest, *found}) == 5


def test_a_manifest_of_another_cache_is_not_trusted(tmp_path):
    source = Pairs()
    build(tmp_path, source)
    [path] = tmp_path.glob("*/manifest.json")
    manifest = json.loads(path.read_text())
    manifest["key"]["max_source_length"] = 5
    path.write_text(json.dumps(manifest))
    build(tmp_path, source)
    assert source.reads == 2


def test_what_an_interrupted_build_left_is_replaced(tmp_path):
    source = Pairs()
    build(tmp_path, source)
    [path] = [path for path in tmp_path.iterdir() if path.is_dir()]
    path.rename(tmp_path / (path.name + ".partial"))
    assert rows(build(tmp_path, source)) == TRUNCATED
    assert source.reads == 2
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [path.name]


def test_a_failed_build_leaves_nothing(tmp_path):
    source = Pairs([("5", "6")] * 3000 + [("x", "7")])
    with pytest.raises(tf.errors.InvalidArgumentError):
        build(tmp_path, source)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_built_once_by_all_who_ask_at_once(tmp_path):
    source = Pairs([("5", "6")] * 3000)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        caches = list(threads.map(lambda _: build(tmp_path, source), range(4)))
    assert source.reads == 1
    assert [len(cache) for cache in caches] == [3000] * 4


def test_an_open_cache_outlives_its_files(tmp_path):
    cache = build(tmp_path)
    shutil.rmtree(tmp_path)
    assert rows(cache) == TRUNCATED


def test_no_example_left(tmp_path):
    with pytest.raises(UserError, match="all 1 are longer"):
        build(tmp_path, Pairs([("5 6 7 8", "9")]), drop_long=True)
    with pytest.raises(UserError, match="validation has no example.$"):
        build(tmp_path, Pairs([]))


def test_unusable_directories(tmp_path):
    with pytest.raises(UserError, match="needs a local folder"):
        build("gs://bucket/cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"{tmp_path}/file.* Name another folder with --cache_dir"):
        build(tmp_path / "file")


def test_with_a_sentencepiece_vocabulary(tmp_path):
    pairs = [(f"source {i} of all", f"target {i * 7}\nof all") for i in range(100)]
    train_sentencepiece([text for pair in pairs for text in pair], 300, tmp_path / "v.model")
    tokenizer = Tokenizer.load(tmp_path / "v.model")
    cache = build_or_load(tmp_path, Pairs(pairs), "train", tokenizer, 100, 100, True)
    for i, pair in enumerate(pairs):
        for text, ids in zip(pair, (cache.source(i), cache.target(i)), strict=True):
            assert ids.tolist() == tokenizer.encode([text], 100).numpy()[0].tolist()


def test_gather():
    random = np.random.default_rng(0)
    lengths = random.integers(0, 9, 50)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    token_rows = TokenRows(random.integers(1, 1000, offsets[-1]).astype(np.uint16), offsets)
    assert len(token_rows) == 50
    assert token_rows.lengths.tolist() == lengths.tolist()
    for count in (0, 1, 20):
        indices = random.permutation(50)[:count]
        expected = np.zeros((count, 9), np.int32)
        for row, i in zip(expected, indices, strict=True):
            row[: lengths[i]] = token_rows.ids[offsets[i] : offsets[i + 1]]
        gathered = token_rows.gather(indices, 9)
        assert gathered.dtype == np.int32
        assert gathered.tolist() == expected.tolist()

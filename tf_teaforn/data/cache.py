"""A split as ids on disk, tokenised once and memory-mapped by every run after that."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import time
import zlib

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from tf_teaforn.data.tokenizer import PAD_ID, SubwordTokenizer, add_eos
from tf_teaforn.errors import UserError
from tf_teaforn.paths import in_turn, is_remote

_logger = logging.getLogger(__name__)

_FORMAT = 1
_TOKENIZE_BATCH = 1024


class TokenRows:
    """Rows of ids of uneven length: row i is `ids[offsets[i]:offsets[i + 1]]`.

    Attributes:
      ids: [total], of any integer type.
      offsets: int64 [N + 1], from 0 to total.
      lengths: int32 [N].
    """

    def __init__(self, ids: np.ndarray, offsets: np.ndarray):
        self.ids = ids
        self.offsets = offsets
        self.lengths = np.diff(offsets).astype(np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """Row `index`, int32 [length]."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]].astype(np.int32)

    def first(self, count: int | None) -> "TokenRows":
        """The first `count` rows, or all."""
        return self if count is None else TokenRows(self.ids, self.offsets[: count + 1])

    def gather(self, indices: np.ndarray, length: int) -> np.ndarray:
        """The rows `indices`, none longer than `length`, as int32 [len(indices), length]."""
        within = np.arange(length) < self.lengths[indices, None]
        positions = self.offsets[indices, None] + np.arange(length)
        rows = np.full(within.shape, PAD_ID, np.int32)
        rows[within] = self.ids[positions[within]]
        return rows


@dataclasses.dataclass(frozen=True, eq=False)
class TokenCache:
    """The examples of one split, both sides ended in EOS.

    Attributes:
      sources: N rows, none longer than max_source_length.
      targets: N rows, none longer than max_target_length.
      max_source_length: the limit it was built with, EOS included.
      max_target_length: likewise.
      too_long: examples of the split longer than a limit, dropped or truncated.
      digest: the same for the same examples in the same order, whenever they were written.
    """

    sources: TokenRows
    targets: TokenRows
    max_source_length: int
    max_target_length: int
    too_long: int
    digest: str = ""

    def __len__(self) -> int:
        return len(self.sources)

    def first(self, count: int | None) -> "TokenCache":
        """The first `count` examples, or all; the digest stays that of all."""
        sources, targets = self.sources.first(count), self.targets.first(count)
        return dataclasses.replace(self, sources=sources, targets=targets)

    @property
    def source_lengths(self) -> np.ndarray:
        """int32 [N], EOS included."""
        return self.sources.lengths

    @property
    def target_lengths(self) -> np.ndarray:
        """int32 [N], EOS included."""
        return self.targets.lengths

    def source(self, index: int) -> np.ndarray:
        """int32 [source_lengths[index]]."""
        return self.sources[index]

    def target(self, index: int) -> np.ndarray:
        """int32 [target_lengths[index]]."""
        return self.targets[index]


def build_or_load(
    directory: str | os.PathLike,
    source,
    split: str,
    tokenizer: SubwordTokenizer,
    max_source_length: int,
    max_target_length: int,
    drop_long: bool,
) -> TokenCache:
    """Opens the cache of `split` in `directory`, after tokenising it there if need be.

    A cache is found by what went into it: the source's fingerprint, the vocabulary, the maximum
    lengths and `drop_long`. Its files are checked by size and CRC-32; one that fails is built anew.
    Processes that ask for the same cache at once build it once. Examples keep the source's order.

    Args:
      directory: a local folder, as the ids are memory-mapped; made if missing.
      source: has `dataset(split)`, (source, target) scalar strings, and `fingerprint(split)`.
      split: name of the split.
      tokenizer: its ids are stored as uint16 where they fit, else as int32.
      max_source_length: EOS included; at least 1.
      max_target_length: likewise.
      drop_long: True (training, unless the task says otherwise) leaves out examples longer than a
        maximum; False truncates them, before EOS. Either is counted and logged as a warning.

    Raises:
      UserError: the directory cannot be used, or no example is left.
    """
    if is_remote(directory):
        raise UserError(f"The token cache needs a local folder, not {os.fspath(directory)}.")
    directory = pathlib.Path(directory)
    key = {
        "format": _FORMAT,
        "source": source.fingerprint(split),
        "vocabulary": tokenizer.fingerprint,
        "max_source_length": max_source_length,
        "max_target_length": max_target_length,
        "drop_long": drop_long,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = directory / f"{re.sub('[^A-Za-z0-9_.-]', '_', split)}-{digest[:16]}"

    cache = _load(path, key)
    if cache is None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with in_turn(path.with_name(path.name + ".lock")):
                cache = _load(path, key)
                if cache is None:
                    _build(path, source.dataset(split), split, tokenizer, key)
                    cache = _load(path, key)
        except OSError as error:
            raise UserError(
                f"{directory}: cannot write the token cache: {error}. Name another folder with "
                "--cache_dir."
            ) from None
    if cache is None:
        raise UserError(f"{path}: the token cache cannot be read back. Check the disk.")
    _report(cache, split, drop_long)
    return cache


def _build(
    path: pathlib.Path, dataset: tf.data.Dataset, split: str, tokenizer: SubwordTokenizer, key: dict
) -> None:
    """Tokenises `dataset` into the folder `path`, written aside and renamed when complete."""
    max_lengths = (key["max_source_length"], key["max_target_length"])

    def encode(*texts):
        sides = [
            side.tokenize(text)
            for side, text in zip((tokenizer, tokenizer.targets), texts, strict=True)
        ]
        too_long = tf.reduce_any(
            [
                side.row_lengths() >= max_length
                for side, max_length in zip(sides, max_lengths, strict=True)
            ],
            axis=0,
        )
        if key["drop_long"]:
            sides = [tf.ragged.boolean_mask(side, ~too_long) for side in sides]
        sides = [add_eos(side, limit) for side, limit in zip(sides, max_lengths, strict=True)]
        return tuple((side.values, side.row_lengths()) for side in sides), too_long

    examples = int(dataset.cardinality())
    batches = (
        dataset.batch(_TOKENIZE_BATCH)
        .map(encode, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
    )

    aside = path.with_name(path.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        too_long, start = 0, time.monotonic()
        with (
            contextlib.ExitStack() as stack,
            # disable=None: no bar where the output is no terminal.
            tqdm(
                desc=f"tokenising {split}",
                total=examples if examples >= 0 else None,
                unit=" examples",
                unit_scale=True,
                disable=None,
            ) as progress,
        ):
            ids_type = "<u2" if tokenizer.vocabulary_size <= 1 << 16 else "<i4"
            sides = [
                stack.enter_context(_RowsWriter(aside, name, ids_type))
                for name in ("source", "target")
            ]
            for encoded, batch_too_long in batches.as_numpy_iterator():
                for side, (ids, lengths) in zip(sides, encoded, strict=True):
                    side.append(ids, lengths)
                too_long += int(batch_too_long.sum())
                progress.update(len(batch_too_long))
        if sides[0].rows == 0:
            raise UserError(
                f"Split {split} has no example"
                + (
                    f" within --max_source_length={max_lengths[0]} and"
                    f" --max_target_length={max_lengths[1]}: all {too_long} are longer. Raise them."
                    if too_long
                    else "."
                )
            )
        _logger.info(
            "%s: %d examples tokenised, %.0f a second",
            split,
            sides[0].rows,
            sides[0].rows / (time.monotonic() - start),
        )
        files = {name: entry for side in sides for name, entry in side.finish().items()}
        manifest = {"key": key, "too_long": too_long, "files": files}
        (aside / "manifest.json").write_text(json.dumps(manifest, indent=1))
        shutil.rmtree(path, ignore_errors=True)
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class _RowsWriter:
    """Writes `TokenRows` as two flat files, NAME.ids and NAME.offsets."""

    def __init__(self, directory: pathlib.Path, name: str, ids_type: str):
        self.rows = 0
        self._directory = directory
        self._name = name
        self._ids_type = ids_type
        self._ids_count = 0
        self._ids_crc = 0
        self._lengths: list[np.ndarray] = []

    def __enter__(self):
        self._file = open(self._directory / f"{self._name}.ids", "wb")
        return self

    def __exit__(self, *exception):
        self._file.close()

    def append(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        ids = ids.astype(self._ids_type)
        self._file.write(ids)
        self._ids_crc = zlib.crc32(ids, self._ids_crc)
        self._ids_count += len(ids)
        self._lengths.append(lengths.astype(np.int32))
        self.rows += len(lengths)

    def finish(self) -> dict[str, dict]:
        """Writes the offsets; returns what the manifest keeps of each file."""
        offsets = np.zeros(self.rows + 1, "<i8")
        np.cumsum(np.concatenate(self._lengths), out=offsets[1:])
        offsets.tofile(self._directory / f"{self._name}.offsets")
        return {
            f"{self._name}.ids": {
                "type": self._ids_type,
                "count": self._ids_count,
                "crc32": self._ids_crc,
            },
            f"{self._name}.offsets": {
                "type": "<i8",
                "count": len(offsets),
                "crc32": zlib.crc32(offsets),
            },
        }


def _load(path: pathlib.Path, key: dict) -> TokenCache | None:
    """Maps the cache at `path`; None if there is none, or one that is damaged."""
    if not path.exists():
        return None
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        if manifest["key"] != key:
            raise ValueError("manifest.json belongs to another cache")
        sides = [
            TokenRows(*(_map(path, f"{side}.{part}", manifest) for part in ("ids", "offsets")))
            for side in ("source", "target")
        ]
        files = json.dumps(manifest["files"], sort_keys=True)
        return TokenCache(
            *sides,
            key["max_source_length"],
            key["max_target_length"],
            manifest["too_long"],
            hashlib.sha256(files.encode()).hexdigest()[:16],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        _logger.warning("the token cache %s is damaged and built anew: %s", path, error)
        return None


def _map(path: pathlib.Path, name: str, manifest: dict) -> np.ndarray:
    entry = manifest["files"][name]
    expected = entry["count"] * np.dtype(entry["type"]).itemsize
    if (size := (path / name).stat().st_size) != expected:
        raise ValueError(f"{name} has {size} bytes instead of {expected}")
    array = np.asarray(np.memmap(path / name, entry["type"], mode="r"))
    if zlib.crc32(array) != entry["crc32"]:
        raise ValueError(f"the checksum of {name} does not match")
    return array


def _report(cache: TokenCache, split: str, drop_long: bool) -> None:
    if not cache.too_long:
        return
    total = len(cache) + cache.too_long if drop_long else len(cache)
    _logger.warning(
        "%s: %d of %d examples (%.2f%%) are longer than %d source or %d target tokens and were %s: "
        "--max_source_length and --max_target_length set these limits",
        split,
        cache.too_long,
        total,
        100 * cache.too_long / total,
        cache.max_source_length,
        cache.max_target_length,
        "dropped" if drop_long else "truncated",
    )

"""Documents as sentence pairs: gap sentences made while training reads, or beforehand.

A source of documents has `splits`, `documents(split)` (an iterator of str, in the same order every
time) and `fingerprint(split)`.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeVar

from etils import epath

from tf_teaforn.cores import usable_cores
from tf_teaforn.data.gaps import VERSION, GapSettings, gap_examples
from tf_teaforn.data.sources import (
    TfdsSource,
    check_split,
    checked_lines,
    is_blank,
    line_text,
    pairs_dataset,
    read_pairs,
    size_and_time,
    with_data_dir,
)
from tf_teaforn.errors import UserError
from tf_teaforn.paths import is_remote, matching

if TYPE_CHECKING:
    import tensorflow as tf

PREPARED = "prepared.json"
# Documents handed to another process at a time.
_CHUNK = 1024
# Numbers of shards, of five digits in their names.
SHARDS = range(1, 100_000)

_logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class DocumentFiles:
    """Text files of one document a line.

    Each split is a path or a pattern ("news-*.txt.gz"), or several, separated by commas. Lines are
    read as those of `sources.TextSource`: UTF-8, `.gz` unpacked, `<n>` is a newline. Blank lines
    are left out.
    """

    train: str | None = None
    validation: str | None = None
    test: str | None = None

    _FLAGS = {"train": "--train_files", "validation": "--valid_files", "test": "--test_files"}

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits for which files are given."""
        return tuple(split for split in self._FLAGS if getattr(self, split))

    def files(self, split: str) -> tuple[str, ...]:
        """Paths of a split, those of one pattern sorted.

        Raises:
            UserError: no files are given, or a pattern matches none.
        """
        check_split("A task on documents", split, tuple(self._FLAGS))
        flag = self._FLAGS[split]
        if not getattr(self, split):
            raise UserError(
                f"There are no documents for split {split!r}. Give {flag}=FILES, one document a "
                "line, or --tfds_name and --tfds_feature."
            )
        found = []
        for pattern in getattr(self, split).split(","):
            if "**" in pattern:
                raise UserError(f"{flag}={pattern}: ** is not known. Write a * for each folder.")
            path = epath.Path(os.path.expanduser(pattern))
            # A name with brackets may be a file's, or a folder's.
            above = [path, *path.parents][: -2 if is_remote(pattern) else None]
            folder = next((p for p in above if p.exists()), path.parent)
            paths = [path] if folder == path else matching(folder, str(path.relative_to(folder)))
            if not paths:
                raise UserError(f"{flag}={pattern}: there is no such file.")
            found += map(str, paths)
        return tuple(found)

    def where(self, split: str) -> str:
        """For messages."""
        return f"{self._FLAGS[split]}={getattr(self, split)}"

    def documents(self, split: str) -> Iterator[str]:
        return itertools.chain.from_iterable(map(read_documents, self.files(split)))

    def fingerprint(self, split: str) -> str:
        """Path, size and time of change of each file."""
        return ":".join(f"{path}:{size_and_time(path)}" for path in self.files(split))


def read_documents(path: str) -> Iterator[str]:
    """The documents of one file."""
    return (line_text(line).decode() for line in checked_lines(path) if not is_blank(line))


class TfdsDocuments(TfdsSource):
    """One text feature of a TensorFlow Datasets builder; both keys name it."""

    _FEATURE = "--tfds_feature"
    _SPLITS = " Name those to use, --tfds_splits=train,validation for example."

    def where(self, split: str) -> str:
        """For messages."""
        return f"{self.name} (split {split})"

    def documents(self, split: str) -> Iterator[str]:
        for document, _ in self.dataset(split).as_numpy_iterator():
            yield document.decode()


@dataclasses.dataclass(frozen=True)
class GapSource:
    """Gap-sentence pairs, made from documents by all cores while they are read.

    Attributes:
        source: of documents.
        settings: how gap sentences are chosen.
        workers: number of processes; None: one a core. Pairs and their order do not depend on it.
    """

    source: DocumentFiles | TfdsDocuments
    settings: GapSettings = GapSettings()
    workers: int | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        return self.source.splits

    def dataset(self, split: str) -> tf.data.Dataset:
        self.source.fingerprint(split)  # An error comes now, not from within tf.data.
        return pairs_dataset(lambda: (tuple(map(str.encode, pair)) for pair in self.pairs(split)))

    def pairs(self, split: str) -> Iterator[tuple[str, str]]:
        """(masked document, gap sentences) of every document that has both.

        How many have not is logged.

        Raises:
            UserError: none has; the documents cannot be read.
        """
        read = pairs = 0

        def documents():
            nonlocal read
            for document in self.source.documents(split):
                read += 1
                yield document

        examples = functools.partial(gap_examples, settings=self.settings)
        for chunk in in_processes(examples, documents(), self.workers):
            pairs += len(chunk)
            yield from chunk
        self.report(split, pairs, read - pairs)

    def report(self, split: str, pairs: int, left_out: int):
        """Warns of documents that are left out.

        Args:
            split: theirs.
            pairs: documents that have a pair.
            left_out: those that have none.

        Raises:
            UserError: there is no pair.
        """
        where, most = self.source.where(split), self.settings.max_words
        if not pairs:
            raise UserError(
                f"{where}: no document has two sentences within --gap_max_words={most}. Raise it, "
                "or give longer documents."
            )
        if left_out:
            _logger.warning(
                "%s: left out %d of %d documents: fewer than two sentences within "
                "--gap_max_words=%d.",
                where,
                left_out,
                pairs + left_out,
                most,
            )

    def fingerprint(self, split: str) -> str:
        rules = f"gaps-{VERSION}:sentencex-{version('sentencex')}"
        return f"{rules}:{self.settings}:{self.source.fingerprint(split)}"

    def with_data_dir(self, data_dir: str) -> GapSource:
        """The same, reading TFDS from `data_dir`."""
        return dataclasses.replace(self, source=with_data_dir(self.source, data_dir))


def in_processes(
    function: Callable[[list[Item]], Result], items: Iterable[Item], workers: int | None = None
) -> Iterator[Result]:
    """`function` of each 1,024 items, in order, computed by processes a little ahead.

    Items are read as results are taken, so that memory stays bounded. What fits one call is
    computed here, without another process.

    Args:
        function: picklable, and importable without cost: each process imports its module.
        items: read in this process.
        workers: number of processes; None: one a core.
    """
    iterator = iter(items)
    chunks = iter(lambda: list(itertools.islice(iterator, _CHUNK)), [])
    first = next(chunks, [])
    second = next(chunks, [])
    workers = workers or usable_cores()
    if not second or workers == 1:
        yield from map(function, itertools.chain((c for c in (first, second) if c), chunks))
        return
    # Forking a process in which TensorFlow runs threads can hang.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=context, initializer=_end_with_parent
    ) as pool:
        pending = collections.deque()
        try:
            for chunk in itertools.chain((first, second), chunks):
                pending.append(pool.submit(function, chunk))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _end_with_parent():
    """Ends this process with the one that started it, which cannot say so when it is killed."""

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    # A terminal sends Ctrl-C to all of its processes; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@dataclasses.dataclass(frozen=True)
class PreparedSource:
    """Pairs that bin/prepare wrote.

    Attributes:
        directory: its --output_dir; may be remote.
    """

    directory: str

    def _manifest(self) -> dict:
        path = epath.Path(self.directory) / PREPARED
        if not path.exists():
            raise UserError(
                f"--prepared={self.directory} has no {PREPARED}: bin/prepare has not finished "
                "there. Give its command again."
            )
        try:
            manifest = json.loads(path.read_bytes())
            splits, shards = manifest["splits"], manifest["shards"]
            if not isinstance(splits, dict) or type(shards) is not int or shards not in SHARDS:
                raise ValueError(f"splits {splits!r}, shards {shards!r}")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise UserError(
                f"{path} is damaged ({error}): give bin/prepare's command again."
            ) from error
        return manifest

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._manifest()["splits"])

    def files(self, split: str) -> tuple[str, ...]:
        """Paths of the split's shards."""
        manifest = self._manifest()
        check_split(self.directory, split, tuple(manifest["splits"]))
        folder = epath.Path(self.directory)
        return tuple(str(folder / name) for name in shard_names(split, manifest["shards"]))

    def dataset(self, split: str) -> tf.data.Dataset:
        files = self.files(split)
        return pairs_dataset(
            lambda: itertools.chain.from_iterable(read_pairs((file,), False) for file in files)
        )

    def fingerprint(self, split: str) -> str:
        return f"prepared:{self._manifest()['splits'][split]}:" + ":".join(
            f"{path}:{size_and_time(path)}" for path in self.files(split)
        )


def shard_names(split: str, shards: int) -> list[str]:
    """File names of a prepared split."""
    return [f"{split}-{shard:05d}-of-{shards:05d}.tsv.gz" for shard in range(shards)]

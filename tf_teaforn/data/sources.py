"""Where sentence pairs come from: TensorFlow Datasets, files of text, a Python function.

Nothing is opened, and tensorflow is not imported, until a split is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import itertools
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, BinaryIO, Protocol

from etils import epath

from tf_teaforn.data.fingerprint import function_fingerprint
from tf_teaforn.errors import UserError, whole_gzip
from tf_teaforn.paths import is_remote

if TYPE_CHECKING:
    import tensorflow as tf

# Pairs handed to tensorflow at a time: one at a time would cost more than reading them.
_CHUNK = 4096
# Bytes read from a file at a time.
_BLOCK = 1 << 16
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_logger = logging.getLogger(__name__)


class Source(Protocol):
    """Sentence pairs, in splits.

    `dataset(split)` is a `tf.data.Dataset` of (source, target), two scalar tf.string tensors of
    UTF-8, not batched, in the same order every time. `fingerprint(split)` is a string that changes
    when the data do. Both raise `UserError` where the data cannot be used.
    """

    @property
    def splits(self) -> tuple[str, ...]: ...

    def dataset(self, split: str) -> tf.data.Dataset: ...

    def fingerprint(self, split: str) -> str: ...


def check_split(name: str, split: str, splits: tuple[str, ...]):
    """Raises `UserError` unless `split` is one of the `splits` of the source or file `name`."""
    if split not in splits:
        raise UserError(f"{name} has no split {split!r}. Write one of: {', '.join(splits)}.")


def pairs_dataset(pairs: Callable[[], Iterable[tuple[bytes, bytes]]]) -> tf.data.Dataset:
    """Streams (source, target) byte strings from Python into tf.data."""
    import numpy as np
    import tensorflow as tf

    def chunks():
        iterator = iter(pairs())
        while chunk := list(itertools.islice(iterator, _CHUNK)):
            # Objects, not fixed-width strings: these would cost the longest line for every line.
            yield tuple(np.array(list(zip(*chunk, strict=True)), dtype=object))

    side = tf.TensorSpec([None], tf.string)
    return tf.data.Dataset.from_generator(chunks, output_signature=(side, side)).unbatch()


@dataclasses.dataclass(frozen=True)
class TfdsSource:
    """Two text features of a TensorFlow Datasets builder.

    Data that are not prepared are not downloaded on the way: they can be hundreds of gigabytes.

    Attributes:
        name: builder name as `tfds.builder` takes it, "wmt14_translate/fr-en".
        source_key: feature read as the source.
        target_key: feature read as the target.
        tfds_splits: our split name -> TFDS split, slices such as "train[:90%]" included.
        preprocess: maps (source, target), scalar tf.string tensors, to the same, in the graph.
            Its own code is part of the fingerprint, and so are its defaults, what it closes over
            and the arguments of a `functools.partial`, functions among them likewise; the code of
            other functions it calls is not, nor is the content of an object whose repr has only
            its address.
        data_dir: where prepared data sets lie; None: TFDS's default, ~/tensorflow_datasets.
    """

    name: str
    source_key: str
    target_key: str
    tfds_splits: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"train": "train", "validation": "validation", "test": "test"}
    )
    preprocess: Callable | None = None
    data_dir: str | None = None

    # What names the features and splits, for messages.
    _FEATURE = "source_key and target_key"
    _SPLITS = ""

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.tfds_splits)

    def with_data_dir(self, data_dir: str) -> TfdsSource:
        """The same, reading from `data_dir`."""
        return dataclasses.replace(self, data_dir=data_dir)

    def _builder(self, split: str):
        """The TFDS builder, after checking that it has the split and both features."""
        import tensorflow as tf
        import tensorflow_datasets as tfds

        check_split(self.name, split, self.splits)
        try:
            builder = tfds.builder(self.name, data_dir=self.data_dir)
        except (ValueError, OSError) as error:
            raise UserError(
                f"TFDS cannot open {self.name} in {self.data_dir or 'its default directory'}: "
                f"{str(error).strip().splitlines()[0]} Name the directory that holds it with "
                "--data_dir=DIR."
            ) from error
        # Splits are known once the data are prepared; `dataset` sees to it that they are.
        if builder.info.splits:
            wanted = self.tfds_splits[split]
            try:
                if not builder.info.splits[wanted].num_examples:
                    raise ValueError("It has no example")
            except (KeyError, ValueError, NotImplementedError) as error:
                names = {part.partition("[")[0].strip() for part in wanted.split("+")}
                if names <= {*builder.info.splits, "all"}:
                    # TFDS puts what it was doing before the reason.
                    reason = str(error).strip().splitlines()[-1].strip().rstrip(".")
                    raise UserError(
                        f"{builder.info.full_name}: {wanted!r} cannot be read: "
                        f"{reason}.{self._SPLITS}"
                    ) from error
                raise UserError(
                    f"{builder.info.full_name} in {builder.data_dir} has no TFDS split "
                    f"{wanted!r}. It has: {', '.join(builder.info.splits)}."
                    f"{self._SPLITS}"
                ) from error
        texts = [
            name
            for name, feature in builder.info.features.items()
            if feature.shape == () and feature.dtype == tf.string
        ]
        for key in (self.source_key, self.target_key):
            if key not in texts:
                raise UserError(
                    f"{builder.info.full_name} has no text feature {key!r}. Write as "
                    f"{self._FEATURE}: {', '.join(texts) or 'another data set, as it has none'}."
                )
        return builder

    def dataset(self, split: str) -> tf.data.Dataset:
        import tensorflow as tf
        import tensorflow_datasets as tfds

        builder = self._builder(split)
        try:
            examples = builder.as_dataset(
                split=self.tfds_splits[split],
                shuffle_files=False,
                read_config=tfds.ReadConfig(try_autocache=False),
            )
        except AssertionError as error:
            where = f", data_dir={self.data_dir!r}" if self.data_dir else ""
            # The command line of TFDS, `tfds build`, needs apache-beam.
            raise UserError(
                f"{self.name} (split {split}) is not prepared: {builder.data_dir} does not exist. "
                'Run, where there is a network, `python -c "import tensorflow_datasets as tfds; '
                f'tfds.builder({self.name!r}{where}).download_and_prepare()"`, or name the '
                "directory that holds it with --data_dir=DIR."
            ) from error
        pairs = examples.map(lambda example: (example[self.source_key], example[self.target_key]))
        if self.preprocess is not None:
            pairs = pairs.map(self.preprocess, num_parallel_calls=tf.data.AUTOTUNE)
        return pairs

    def fingerprint(self, split: str) -> str:
        """Name, version, split, and when and how large the data were written."""
        builder = self._builder(split)
        written = ""
        if builder.info.splits:
            info = builder.info.splits[self.tfds_splits[split]]
            description = os.path.join(builder.data_dir, "dataset_info.json")
            written = f"{info.num_examples}:{size_and_time(description)}"
        return ":".join(
            (
                "tfds",
                builder.info.full_name,
                self.tfds_splits[split],
                self.source_key,
                self.target_key,
                function_fingerprint(self.preprocess),
                written,
            )
        )


def size_and_time(path: str) -> str:
    """What changes when a file does, for the `fingerprint` of a source.

    Raises:
        UserError: a pipe, as a shell's <(...) names, of which nothing stays to be read again.
    """
    if is_remote(path):
        found = epath.Path(path).stat()
        return f"{found.length}:{found.mtime}"
    found = os.stat(path)
    if stat.S_ISFIFO(found.st_mode):
        raise UserError(
            f"{path}: a pipe can be read once only, data are read several times. Write them to a "
            "file; one whose name ends in .gz is unpacked."
        )
    return f"{found.st_size}:{found.st_mtime_ns}"


def with_data_dir(source: Source, data_dir: str | None) -> Source:
    """`source`, reading TFDS from `data_dir`; unchanged where `data_dir` is None or empty.

    Raises:
        UserError: `source` does not read TFDS.
    """
    if not data_dir:
        return source
    if not hasattr(source, "with_data_dir"):
        raise UserError("--data_dir is for tasks that read TFDS; this task does not. Leave it out.")
    return source.with_data_dir(data_dir)


@dataclasses.dataclass(frozen=True)
class TextSource:
    """A user's own text files.

    Each split is one file of `source<TAB>target` lines, or two files of as many lines each, written
    "source,target"; a name that ends in .gz is read through gzip, and any path that `etils.epath`
    opens will do. Files are UTF-8 and are streamed, never held in memory.

    A line ends at b"\\n" and nowhere else: U+2028 and its like are ordinary characters, so line
    numbers are those of `sed` and `wc -l`. One carriage return before the line end is dropped, as
    is a byte order mark at the start of the file. `<n>` stands for a newline inside a text and
    is read as one.

    In split "train" a pair with a blank side is left out, and how many is logged; in other splits
    every line counts, so that line i of the output answers line i of the file.

    The first `dataset(split)` reads the files once in full and raises `UserError` with file and
    line for: no such file, an empty file, only blank lines, source and target of different length,
    a line without exactly one tab, bytes that are not UTF-8, a NUL.
    """

    train: str | None = None
    validation: str | None = None
    test: str | None = None

    _FLAGS = {"train": "--train_files", "validation": "--valid_files", "test": "--test_files"}

    def __post_init__(self):
        for split in self.splits:
            files = self._files(split)
            if len(files) > 2 or not all(files):
                raise UserError(
                    f"{self._FLAGS[split]}={getattr(self, split)} is neither one file nor two. "
                    "Write one TSV file, or SOURCE,TARGET."
                )

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits for which files are given."""
        return tuple(split for split in self._FLAGS if getattr(self, split))

    def _files(self, split: str) -> tuple[str, ...]:
        if split in self._FLAGS and not getattr(self, split):
            raise UserError(
                f"There are no files for split {split!r}. Give {self._FLAGS[split]}=one TSV file "
                "(source<TAB>target a line), or SOURCE,TARGET."
            )
        check_split("A text task", split, tuple(self._FLAGS))
        return tuple(os.path.expanduser(part) for part in getattr(self, split).split(","))

    def dataset(self, split: str) -> tf.data.Dataset:
        import tensorflow as tf

        files, drop_blank = self._files(split), split == "train"
        count = _count_pairs(files, drop_blank, self.fingerprint(split))
        pairs = pairs_dataset(lambda: read_pairs(files, drop_blank))
        return pairs.apply(tf.data.experimental.assert_cardinality(count))

    def fingerprint(self, split: str) -> str:
        """Path, size and time of change of each file."""
        files = self._files(split)
        for path in files:
            if not epath.Path(path).exists():
                raise UserError(f"{path}: no such file. Check {self._FLAGS[split]}.")
        return ":".join(
            ["text", "blank dropped" if split == "train" else "all"]
            + [f"{path}:{size_and_time(path)}" for path in files]
        )


def read_file(path: str) -> Iterator[bytes]:
    """Lines of a file as `lines_of` has them; one whose name ends in .gz is unpacked."""
    try:
        with whole_gzip(path), epath.Path(path).open("rb") as raw:
            yield from lines_of(gzip.open(raw) if path.endswith(".gz") else raw)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from error


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Lines without their ends, the first without a byte order mark."""
    for number, line in enumerate(_split_lines(file)):
        if number == 0:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        yield line.removesuffix(b"\r")


def _split_lines(file: BinaryIO) -> Iterator[bytes]:
    # Iterating over the file itself would lose the carriage returns inside the lines of remote
    # files, which TensorFlow reads.
    # Joined once a line, however long it is.
    parts = []
    while block := file.read(_BLOCK):
        first, *others = block.split(b"\n")
        parts.append(first)
        for other in others:
            yield b"".join(parts)
            parts = [other]
    if rest := b"".join(parts):
        yield rest


def line_text(line: bytes) -> bytes:
    """A text as a line of a file holds it: `<n>` is a newline."""
    return line.replace(b"<n>", b"\n")


def is_blank(line: bytes) -> bool:
    """Whether a line's text is nothing or white space."""
    return not line_text(line).decode().strip()


def read_pairs(files: tuple[str, ...], drop_blank: bool) -> Iterator[tuple[bytes, bytes]]:
    """(source, target) of files that `_count_pairs` has passed."""
    if len(files) == 1:
        pairs = (line.split(b"\t") for line in read_file(files[0]))
    else:
        pairs = zip(*map(read_file, files), strict=True)
    for source, target in pairs:
        if not (drop_blank and (is_blank(source) or is_blank(target))):
            yield line_text(source), line_text(target)


def check_line(line: bytes, place: str) -> bytes:
    """The line, which is UTF-8 without NUL.

    Raises:
        UserError: it is not; the message begins with `place`.
    """
    if b"\0" in line:
        raise UserError(
            f"{place}: byte {line.index(0) + 1} of the line is NUL. Is this a file of UTF-8 text?"
        )
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place}: byte {error.start + 1} of the line (0x{line[error.start]:02x}) is not "
            "UTF-8. Convert the file, with iconv for example."
        ) from error
    return line


def checked_lines(path: str) -> Iterator[bytes]:
    """Lines of a file, each as `check_line` has it; at least one."""
    number = 0
    for number, line in enumerate(read_file(path), start=1):
        yield check_line(line, f"{path}:{number}")
    if number == 0:
        raise UserError(f"{path}: the file is empty.")


def _checked_columns(path: str) -> Iterator[tuple[bytes, bytes]]:
    """Both columns of a TSV file, ("", "") for blank lines, an error after the last if any."""
    first_blank, any_text = 0, False
    for number, line in enumerate(checked_lines(path), start=1):
        tabs = line.count(b"\t")
        if tabs == 1:
            any_text = True
            yield tuple(line.split(b"\t"))
        elif is_blank(line) and tabs == 0:
            first_blank = first_blank or number
            yield b"", b""
        else:
            raise UserError(
                f"{path}:{number}: {tabs} tabs. Write source<TAB>target, with exactly one tab."
            )
    if first_blank and any_text:
        raise UserError(
            f"{path}:{first_blank}: a blank line. Write source<TAB>target, with exactly one tab."
        )


def _checked_rows(source: str, target: str) -> Iterator[tuple[bytes, bytes]]:
    """Pairs of lines of two files, an error after the last if one file is longer."""
    counts = [0, 0]
    for pair in itertools.zip_longest(checked_lines(source), checked_lines(target)):
        counts = [count + (line is not None) for count, line in zip(counts, pair, strict=True)]
        if None not in pair:
            yield pair
    if counts[0] != counts[1]:
        raise UserError(
            f"{source} has {counts[0]} lines and {target} has {counts[1]}. Line i of one must be "
            "the translation of line i of the other."
        )


@functools.lru_cache
def _count_pairs(files: tuple[str, ...], drop_blank: bool, fingerprint: str) -> int:
    """Checks files, and counts the pairs that `read_pairs` will yield."""
    del fingerprint  # Here so that files that have changed are read again.
    pairs = kept = 0
    blank = [0, 0]
    for pair in _checked_columns(*files) if len(files) == 1 else _checked_rows(*files):
        pairs += 1
        sides = [is_blank(side) for side in pair]
        blank = [count + side for count, side in zip(blank, sides, strict=True)]
        kept += not (drop_blank and any(sides))
    for count, path, side in zip(blank, (files[0], files[-1]), ("source", "target"), strict=True):
        if count == pairs:
            raise UserError(f"{path}: the {side} side has only blank lines.")
    if kept == 0:
        raise UserError(f"{','.join(files)}: one side of every pair is blank. Check the files.")
    if kept < pairs:
        _logger.warning(
            "%s: left out %d of %d pairs, whose source or target is blank.",
            ",".join(files),
            pairs - kept,
            pairs,
        )
    return kept


@dataclasses.dataclass(frozen=True)
class GeneratedSource:
    """Pairs that a Python function makes.

    Attributes:
        function: split -> (source, target) strings, the same and in the same order every time; a
            named function, whose name is part of the fingerprint.
        version: changes whenever what `function` yields does; files that it reads are not looked
            at.
    """

    function: Callable[[str], Iterable[tuple[str, str]]]
    version: str
    splits: tuple[str, ...] = ("train", "validation", "test")

    def dataset(self, split: str) -> tf.data.Dataset:
        check_split("This task", split, self.splits)
        return pairs_dataset(
            lambda: ((source.encode(), target.encode()) for source, target in self.function(split))
        )

    def fingerprint(self, split: str) -> str:
        check_split("This task", split, self.splits)
        name = f"{self.function.__module__}.{self.function.__qualname__}"
        return f"generated:{name}:{split}:{self.version}"

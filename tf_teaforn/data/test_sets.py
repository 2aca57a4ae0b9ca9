"""Test sets by name, as the `sacrebleu` command knows them."""

import contextlib
import hashlib
import http.client
import socket
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from portalocker import LockException

from tf_teaforn.data.sources import TfdsSource
from tf_teaforn.errors import UserError, did_you_mean
from tf_teaforn.paths import in_turn

# What goes wrong in a download, or in unpacking it.
_FAILURES = (
    OSError,
    http.client.HTTPException,
    tarfile.TarError,
    zipfile.BadZipFile,
    EOFError,
)
# Seconds without an answer after which a download is given up.
_TIMEOUT = 30


def language_pair_of(source) -> str | None:
    """ "en-de" where the features of a TFDS source are named by language codes, else None."""
    if isinstance(source, TfdsSource):
        codes = (source.source_key, source.target_key)
        if all(len(code) == 2 for code in codes):
            return "-".join(codes)
    return None


def read_test_set(name: str, language_pair: str | None) -> tuple[list[str], list[str]]:
    """(sources, references) of a test set, from sacreBLEU's cache or else downloaded into it.

    "wmt14" is English-German's 2,737 lines (3,003 in "wmt14/full") and English-French's 3,003.

    Args:
        name: as `sacrebleu --list` prints it.
        language_pair: "en-de" and the like.

    Raises:
        UserError: no such set or pair; not in the cache and no way to download it, or another
            process does for more than a minute.
    """
    from sacrebleu.dataset import DATASETS

    if name not in DATASETS:
        guess = did_you_mean(name, DATASETS, most=3)
        raise UserError(
            f"--test_set={name}: sacrebleu has no such test set.{guess} `sacrebleu --list` prints "
            "all of them."
        )
    dataset = DATASETS[name]
    if language_pair not in dataset.langpairs:
        raise UserError(
            f"--language_pair={language_pair}: the test set {name} has "
            f"{', '.join(sorted(dataset.langpairs))}. Name one of them."
        )
    with _alone(dataset):
        _fetch(dataset, language_pair)
        sources = list(dataset.source(language_pair))
        references = [row[0].rstrip() for row in _single_references(dataset, language_pair)]
    if len(sources) != len(references):
        raise UserError(
            f"--test_set={name}: sacrebleu's cache has {len(sources)} sources and "
            f"{len(references)} references. Remove the set's folder there and try again."
        )
    return sources, references


@contextlib.contextmanager
def _alone(dataset) -> Iterator[None]:
    """Inside no other process of ours reads or writes the set: sacrebleu writes files in place."""
    folder = Path(dataset._outdir)
    with contextlib.ExitStack() as stack:
        # A cache that cannot be written to needs no lock.
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(in_turn(folder / "tf_teaforn.lock"))
        yield


def _fetch(dataset, language_pair):
    """Sees to it that the set is in the cache."""
    name = dataset.name
    try:
        with _timeout():
            dataset.get_files(language_pair)
    except LockException as error:
        raise UserError(
            f"--test_set={name}: another process has been downloading it to {dataset._rawdir} for "
            "a minute. Wait for it, or end it, and try again."
        ) from error
    # sacrebleu exits where certificates or checksums are wrong.
    except (*_FAILURES, SystemExit) as error:
        damaged = _damaged(dataset)
        if damaged:
            raise UserError(
                f"--test_set={name}: {damaged} is not what sacrebleu expects, perhaps a network's "
                "log-in page in its place. Remove that file and try again."
            ) from error
        if isinstance(error, FileNotFoundError) and len(_downloaded(dataset)) == len(dataset.data):
            # sacrebleu unpacks only what it has just downloaded.
            raise UserError(
                f"--test_set={name}: {dataset._rawdir} lacks {error.filename}, as if it had been "
                f"unpacked in part. Remove {dataset._outdir} and try again."
            ) from error
        raise UserError(
            f"--test_set={name} is not in sacrebleu's cache and cannot be downloaded ({error}). "
            f"Run `sacrebleu --download {name} -l {language_pair}` where there is a network; the "
            "cache is $SACREBLEU, or ~/.sacrebleu, and can be copied."
        ) from error


def _downloaded(dataset) -> list[tuple[Path, str]]:
    """(path in the cache, checksum) of what is there; empty files are downloaded anew."""
    paths = [Path(dataset._rawdir, dataset._get_tarball_filename(url)) for url in dataset.data]
    archives = zip(paths, dataset.md5, strict=True)
    return [(path, digest) for path, digest in archives if path.exists() and path.stat().st_size]


def _damaged(dataset) -> str | None:
    """A file of the cache's that has not the checksum of what should have been downloaded."""
    for path, expected in _downloaded(dataset):
        if hashlib.md5(path.read_bytes()).hexdigest() != expected:
            return str(path)
    return None


def _single_references(dataset, language_pair) -> Iterator[tuple[str]]:
    for row in dataset.references(language_pair):
        if len(row) != 1:
            raise UserError(
                f"--test_set={dataset.name} has {len(row)} references a line for {language_pair}; "
                "sets with one are supported. Decode it with bin/decode and score the output with "
                "the sacrebleu command."
            )
        yield row


class _timeout:
    """Downloads have no time limit of their own."""

    def __enter__(self):
        self._before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(_TIMEOUT)

    def __exit__(self, *_):
        socket.setdefaulttimeout(self._before)

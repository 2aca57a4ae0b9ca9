"""Gap-sentence pairs by an Apache Beam pipeline: on this machine's cores, or on many machines.

Which shard a document's pair goes to, and where in it, follows from the document and the seed. So
the files are the same, byte for byte, whatever the runner, the number of workers and the order in
which they work.
"""

import collections
import contextlib
import gzip
import io
import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Sequence

import apache_beam as beam
from apache_beam.metrics import Metrics, MetricsFilter
from apache_beam.options.pipeline_options import PipelineOptions
from etils import epath

from tf_teaforn.data.documents import (
    PREPARED,
    DocumentFiles,
    GapSource,
    read_documents,
    shard_names,
)
from tf_teaforn.data.gaps import GapSettings, document_hash, gap_example
from tf_teaforn.data.sources import read_pairs
from tf_teaforn.errors import UserError, user_error_in
from tf_teaforn.paths import matching, write_whole

# Keeps DirectRunner from PrismRunner, a program that it would download and that runs all Python in
# one process.
WITHOUT_PRISM = "--allow_unsafe_triggers"

_PLAN = "plan.json"
# Namespace of the counters of documents.
_COUNTERS = "gaps"

_logger = logging.getLogger(__name__)


def prepare(source: GapSource, output_dir: str, shards: int, options: Sequence[str]) -> list[str]:
    """Writes the pairs of all splits to `output_dir`, for `PreparedSource`.

    Shards are written aside and renamed, and prepared.json comes last: what a killed run leaves is
    whole shards, which the next run keeps, and names that it removes.

    Args:
        source: documents and how to choose gap sentences.
        output_dir: may be remote; made if missing.
        shards: number of files of each split.
        options: Beam's pipeline options, as on its command lines;
            ["--runner=DirectRunner", WITHOUT_PRISM].

    Returns:
        Names of the files that this call wrote.

    Raises:
        UserError: the folder holds shards of other documents or settings; documents
            cannot be read, or none has a pair; Beam does not take the options.
    """
    _check_options(options)
    splits = {split: source.fingerprint(split) for split in source.splits or ("train",)}
    for split in source.splits:
        # Documents that cannot be read are known before anything is written.
        next(source.source.documents(split), None)
    folder = epath.Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"splits": splits, "shards": shards}, indent=2) + "\n"
    plan = folder / _PLAN
    others = plan.exists() and plan.read_text() != content
    # Where nothing was written, documents or settings may have been mended since.
    if others and any(map(_is_there, matching(folder, "*.tsv.gz"))):
        raise UserError(
            f"--output_dir={output_dir} was begun with other documents, settings or --shards. Take "
            "them up, or another --output_dir."
        )
    if others or not plan.exists():
        write_whole(plan, content)
    for left in matching(folder, "*.partial"):
        left.unlink()
    written = []
    for split in source.splits:
        names = shard_names(split, shards)
        missing = [i for i, name in enumerate(names) if not _is_there(folder / name)]
        counts = collections.Counter()
        if missing:
            _logger.info("%s: %d of %d shards to write", split, len(missing), shards)
            with (
                _own_errors(),
                beam.Pipeline(options=PipelineOptions(list(options))) as pipeline,
            ):
                _shards(pipeline, source, split, output_dir, shards, missing)
            # Not every runner counts.
            with contextlib.suppress(NotImplementedError):
                found = pipeline.result.metrics().query(MetricsFilter().with_namespace(_COUNTERS))
                for counter in found["counters"]:
                    counts[counter.key.metric.name] += counter.result
        # Shards that another call has written are in no count.
        lines = (read_pairs((str(folder / name),), False) for name in names)
        if counts["pairs"] or not any(itertools.chain.from_iterable(lines)):
            try:
                source.report(split, counts["pairs"], counts["left_out"])
            except UserError:
                # Shards without a pair would stand in the way of other settings.
                for name in names:
                    (folder / name).unlink(missing_ok=True)
                raise
        written += [names[i] for i in missing]
    write_whole(folder / PREPARED, content)
    return written


def _check_options(options: Sequence[str]) -> None:
    """Finds what Beam does not take, before anything is written."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            found = PipelineOptions(list(options))
            # Some are else read as late as the pipeline runs.
            found.get_all_options()
        beam.Pipeline(options=found)
    except SystemExit:
        raise _refusal(told.getvalue().rpartition("error: ")[2]) from None
    except (AttributeError, ImportError, ValueError) as error:
        raise _refusal(error) from error


def _refusal(reason: object) -> UserError:
    return UserError(f"{str(reason).strip().rstrip('.')}. Check --runner and --beam_options.")


def _is_there(shard: epath.Path) -> bool:
    if not shard.exists():
        return False
    # A power cut leaves an empty file where one was not flushed.
    with shard.open("rb") as file:
        return bool(file.read(1))


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Turns what Beam makes of a worker's `UserError`, and a missing package, into `UserError`."""
    try:
        yield
    except ImportError as error:
        # Of a package that a runner needs.
        raise _refusal(error) from error
    except Exception as error:
        if message := user_error_in(error):
            raise UserError(message) from error
        raise


def _shards(
    pipeline: beam.Pipeline,
    source: GapSource,
    split: str,
    output_dir: str,
    shards: int,
    missing: Sequence[int],
):
    """Adds to `pipeline` what writes the missing shards of a split."""
    if isinstance(source.source, DocumentFiles):
        documents = (
            pipeline
            | "files" >> beam.Create(source.source.files(split))
            | "spread files" >> beam.Reshuffle()
            | "read files" >> beam.FlatMap(read_documents)
        )
    else:
        # One worker reads; the work, which is to choose sentences, is spread below.
        documents = (
            pipeline
            | "splits" >> beam.Create([split])
            | "read TFDS" >> beam.FlatMap(source.source.documents)
        )
    pairs = (
        documents
        | "spread documents" >> beam.Reshuffle()
        | "choose" >> beam.FlatMap(_keyed_pair, source.settings, shards, frozenset(missing))
    )
    # A shard without a document is a file too.
    empty = pipeline | "shards" >> beam.Create([(shard, None) for shard in missing])
    _ = (
        (pairs, empty)
        | beam.Flatten()
        | beam.GroupByKey()
        | "write" >> beam.Map(_write_shard, output_dir, shard_names(split, shards))
    )


def _keyed_pair(
    document: str, settings: GapSettings, shards: int, missing: frozenset[int]
) -> Iterator[tuple[int, tuple[int, str, str]]]:
    """(shard, (place, source, target)), if the document has a pair and the shard is missing."""
    place = document_hash(document, settings.seed)
    if place % shards in missing:
        pair = gap_example(document, settings)
        Metrics.counter(_COUNTERS, "pairs" if pair else "left_out").inc()
        if pair:
            yield place % shards, (place, *pair)


def _write_shard(
    shard_and_pairs: tuple[int, Iterable[tuple[int, str, str] | None]],
    output_dir: str,
    names: Sequence[str],
) -> None:
    shard, pairs = shard_and_pairs
    raw = io.BytesIO()
    with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        for _, *sides in sorted(pair for pair in pairs if pair):
            file.write("\t".join(side.replace("\n", "<n>") for side in sides).encode() + b"\n")
    write_whole(epath.Path(output_dir) / names[shard], raw.getvalue())

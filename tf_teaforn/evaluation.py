"""Metrics of a model on a split or test set: hypotheses and scores, written beside the model."""

import dataclasses
import hashlib
import json
import logging
import re
import shlex
import time
from collections.abc import Mapping, Sequence

from etils import epath

from tf_teaforn import model_dir as model_dirs
from tf_teaforn.config import SENTENCES_AT_A_TIME
from tf_teaforn.data.sources import checked_lines, line_text
from tf_teaforn.data.test_sets import language_pair_of, read_test_set
from tf_teaforn.data.tokenizers import load_tokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.inference import Translator, search_config
from tf_teaforn.metrics import (
    check_metrics,
    compare,
    compute_metrics,
    default_metrics,
    newline_warning,
    script_warning,
    tokenized_warning,
)
from tf_teaforn.paths import write_whole
from tf_teaforn.texts import cut_warning, to_lines

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Request:
    """What to score, and how.

    Attributes:
        split: of the task's data; without meaning where a test set is named.
        checkpoint: best, latest, <step>, average:<n> or the name of a written average.
        beam_sizes: beam widths; none: the run's.
        alpha: exponent of the length penalty; None: the run's.
        outputs: max_length, min_length, no_repeat_ngram of `SearchConfig`, those that are not to be
            the run's. They are part of the results and of their files' names.
        batch_size: sentences that are decoded at a time.
        test_set: one of sacreBLEU's, in place of a split.
        language_pair: of the test set; None: the task's own.
        metrics: of `compute_metrics`; none: the task's, and chrF and TER where BLEU is among them.
        compare: file of another system's hypotheses, one a line, to test the difference to.
        intervals: whether to add 95% bootstrap intervals.
        command: the command line, for the record.
    """

    split: str = "test"
    checkpoint: str = "best"
    beam_sizes: Sequence[int] = ()
    alpha: float | None = None
    outputs: Mapping[str, int] = dataclasses.field(default_factory=dict)
    batch_size: int = SENTENCES_AT_A_TIME
    test_set: str | None = None
    language_pair: str | None = None
    metrics: Sequence[str] = ()
    compare: str | None = None
    intervals: bool = False
    command: Sequence[str] = ()


def read_examples(source, split, count=None):
    """(sources, references) of a split, or of its first `count` examples, as two lists of str."""
    examples = source.dataset(split).take(-1 if count is None else count)
    pairs = [(s.decode(), t.decode()) for s, t in examples.as_numpy_iterator()]
    if not pairs:
        raise UserError(f"The split {split} has no examples.")
    return tuple(map(list, zip(*pairs, strict=True)))


def evaluate_translator(translator, task, sources, references):
    """`MetricResult` of what a `Translator` makes of `sources`."""
    return compute_metrics(task.metrics, translator(sources), references)


def evaluate(model_dir, task, request=Request()):
    """Scores a checkpoint and writes `eval/<set>-<checkpoint>-beam<k>-alpha<a>.json` and `.txt`.

    Each of `request.outputs` follows in the names as `-<field><value>`. The references are written
    beside them, to `eval/<set>.references.txt`; their SHA-256 is in the results. What is
    there of the set with other references is moved to `eval/<set>-<start of their SHA-256>/` first.
    All beam widths are decoded with one model that is loaded once.

    Args:
        model_dir: what `bin/train` wrote.
        task: the run's `Task`.
        request: `Request`.

    Returns:
        The contents of the JSON files, a list.

    Raises:
        UserError: the set, its languages, a metric, a beam width or the file to compare with cannot
            be used; there is no such model or checkpoint.
        OSError: the results cannot be written.
    """
    config = model_dirs.read_config(model_dir)
    alpha = config.decoding.beam_alpha if request.alpha is None else request.alpha
    searches = [
        search_config(config.decoding, beam_size=beam_size, alpha=float(alpha), **request.outputs)
        for beam_size in request.beam_sizes or [config.decoding.beam_size]
    ]
    metrics = tuple(request.metrics) or default_metrics(task.metrics)
    check_metrics(metrics)
    sources, references = _examples(task, request)
    baseline = _baseline(request.compare, len(references))
    tokenizer = load_tokenizer(model_dir)
    seq2seq, state = model_dirs.load_seq2seq(model_dir, config, tokenizer, request.checkpoint)
    folder = epath.Path(model_dir) / "eval"
    folder.mkdir(parents=True, exist_ok=True)
    set_name = request.test_set or request.split
    reference_bytes = to_lines(references)
    _put_aside(folder, _file_name(set_name), reference_bytes)
    write_whole(folder / f"{_file_name(set_name)}.references.txt", reference_bytes)
    results = []
    warned = set()
    for search in searches:
        translator = Translator(
            seq2seq,
            tokenizer,
            search,
            config.data.max_source_length,
            config.data.max_target_length,
        )
        translator.batch_size = request.batch_size
        start = time.time()
        hypotheses = translator(sources, progress=True)
        scores = compute_metrics(metrics, hypotheses, references, request.intervals)
        warnings = _warnings(translator, metrics, hypotheses, references)
        # Sources are cut alike for every beam width.
        for warning in warnings:
            if warning not in warned:
                _logger.warning("Warning: %s", warning)
        warned.update(warnings)
        result = {
            "metrics": dict(scores.values),
            "signature": dict(scores.signatures),
            "examples": len(sources),
            "beam_size": search.beam_size,
            "beam_alpha": search.alpha,
            **request.outputs,
            "checkpoint": state["checkpoint"],
            "steps": state["steps"],
            "split": set_name,
            "references_sha256": hashlib.sha256(reference_bytes).hexdigest(),
            "warnings": warnings,
            "command": shlex.join(request.command),
            "seconds": time.time() - start,
        }
        if request.intervals:
            result["interval_95"] = {name: list(pair) for name, pair in scores.intervals.items()}
        if baseline:
            result["compared_with"] = request.compare
            result["comparison"] = {
                value: dataclasses.asdict(compare(value, baseline, hypotheses, references))
                for value in scores.values
            }
        name = _file_name(
            f"{set_name}-{state['checkpoint']}-beam{search.beam_size}-alpha{search.alpha}"
        )
        name += "".join(f"-{field}{value}" for field, value in request.outputs.items())
        write_whole(folder / f"{name}.txt", to_lines(hypotheses))
        write_whole(folder / f"{name}.json", json.dumps(result, indent=2) + "\n")
        results.append(result)
    return results


def _examples(task, request):
    if request.test_set is None:
        if request.language_pair:
            raise UserError("--language_pair belongs to --test_set. Leave it out, or name a set.")
        return read_examples(task.source, request.split)
    pair = request.language_pair or language_pair_of(task.source)
    if pair is None:
        raise UserError(
            f"--test_set={request.test_set}: the task does not say which languages it is about. "
            "Add --language_pair, for example --language_pair=en-de."
        )
    return read_test_set(request.test_set, pair)


def _baseline(path, count):
    if path is None:
        return None
    if not epath.Path(path).exists():
        raise UserError(f"--compare={path}: there is no such file.")
    lines = [line_text(line).decode() for line in checked_lines(str(path))]
    if len(lines) != count:
        raise UserError(
            f"--compare={path} has {len(lines)} lines for {count} references: it answers another "
            "test set."
        )
    return lines


def _put_aside(folder, name, reference_bytes):
    """Moves a set's files together to a folder of their own, if they are of other references."""
    references = folder / f"{name}.references.txt"
    earlier = references.read_bytes() if references.exists() else reference_bytes
    if earlier == reference_bytes:
        return
    aside = folder / f"{name}-{hashlib.sha256(earlier).hexdigest()[:8]}"
    aside.mkdir(exist_ok=True)
    checkpoint = r"(best|\d+|average-\d+-\d+)"
    own = re.compile(rf"{re.escape(name)}-{checkpoint}-beam\d+-alpha.+\.(json|txt)")
    found = [path for path in folder.iterdir() if own.fullmatch(path.name)]
    # The references come last: a move that is interrupted goes on next time.
    for path in (*found, references):
        path.replace(aside / path.name)
    _logger.warning(
        "Warning: what %s had of %s was of other references: it is in %s now.", folder, name, aside
    )


def _warnings(translator, metrics, hypotheses, references):
    found = [
        cut_warning(translator.cut_sources, len(hypotheses), translator.max_source_length),
        # ROUGE drops all punctuation.
        None
        if set(metrics) <= {"rouge", "exact_match"}
        else tokenized_warning(hypotheses, references),
        script_warning(metrics, references),
        newline_warning(metrics, hypotheses, references),
    ]
    return [warning for warning in found if warning]


def _file_name(name):
    return name.replace("/", "_").replace(":", "_")

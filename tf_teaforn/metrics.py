"""BLEU, chrF, TER, ROUGE and exact match, each with a signature that makes it reproducible.

BLEU (Papineni et al., 2002), chrF (Popović, 2015) and TER (Snover et al., 2006) are sacreBLEU's
(Post, 2018, "A Call for Clarity in Reporting BLEU Scores"); ROUGE is rouge-score's (Lin, 2004,
"ROUGE: A Package for Automatic Evaluation of Summaries").
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import sacrebleu
from rouge_score import rouge_scorer, scoring
from sacrebleu.significance import PairedTest

from tf_teaforn.errors import UserError

_ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_RESAMPLES = 1000
_SEED = 12345  # sacreBLEU's own

# At its defaults, each is what the `sacrebleu` command computes where no language is named.
_SACREBLEU = {
    "bleu": sacrebleu.BLEU,
    "bleu_lc": functools.partial(sacrebleu.BLEU, lowercase=True),
    "chrf": sacrebleu.CHRF,
    "ter": sacrebleu.TER,
}
_NAMES = ("bleu", "rouge", "exact_match", "bleu_lc", "chrf", "ter")


@dataclasses.dataclass(frozen=True)
class MetricResult:
    """Values (0 to 100; TER, where less is better, may be more), by name, and how they were made.

    Attributes:
        values: scores.
        signatures: under the same names, how each was computed.
        intervals: under the same names (low, high), where they were asked for.
    """

    values: Mapping[str, float]
    signatures: Mapping[str, str]
    intervals: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A system against a baseline on the same sentences.

    Attributes:
        baseline, system: scores.
        p_value: of the difference, by paired bootstrap resampling (Koehn, 2004). It is
            sacreBLEU's estimate, in effect one-sided: double it for a two-sided test. In
            simulations with equally good systems p < .05 comes up about 11 times in 100, twice
            p < .05 about 5 times, and p stays below .45, but for equal scores, where it is 1.
        signature: of metric and test.
    """

    baseline: float
    system: float
    p_value: float
    signature: str


def check_metrics(names: Iterable[str]):
    """Raises `UserError` for a name that is not a metric."""
    for name in names:
        if name not in _NAMES:
            raise UserError(f"there is no metric {name!r}; choose from {', '.join(_NAMES)}")


def default_metrics(names: Sequence[str]) -> tuple[str, ...]:
    """A task's metrics, with chrF and TER where BLEU is among them."""
    besides = ("chrf", "ter") if "bleu" in names else ()
    return tuple(dict.fromkeys((*names, *besides)))


def compute_metrics(
    names: Iterable[str],
    hypotheses: Sequence[str],
    references: Sequence[str],
    intervals: bool = False,
) -> MetricResult:
    """Scores hypotheses against one reference each.

    Args:
        names: any of "bleu" (corpus BLEU with 13a tokens, mixed case), "bleu_lc" (the same in
            lower case), "chrf", "ter", "rouge" (F-measure x 100 of rouge1, rouge2, rougeL and
            rougeLsum, Porter stemmer on, mean over the examples; lines are the sentences of
            rougeLsum) and "exact_match" (percent of equal texts).
        hypotheses, references: texts in the same order; a newline separates sentences.
        intervals: whether to estimate 95% intervals too, from 1,000 bootstrap resamples of the
            examples (not for exact_match).

    Raises:
        ValueError: the two lists are empty or differ in length.
        UserError: a name is not a metric.
    """
    names = tuple(names)
    _check_texts(hypotheses, references)
    check_metrics(names)
    values: dict[str, float] = {}
    signatures: dict[str, str] = {}
    ranges: dict[str, tuple[float, float]] = {}
    for name in names:
        if name in _SACREBLEU:
            metric = _SACREBLEU[name]()
            lines = _in_lines(hypotheses), [_in_lines(references)]
            values[name] = metric.corpus_score(*lines).score
            signatures[name] = str(metric.get_signature())
            if intervals:
                (result,), _ = _sacrebleu_bootstrap(name, [hypotheses], references)
                mean, half = float(result.mean), float(result.ci)
                ranges[name] = (mean - half, mean + half)
        else:
            examples, signature = _example_scores(name, hypotheses, references)
            for value, scores in examples.items():
                values[value], signatures[value] = float(np.mean(scores)), signature
            if intervals and name == "rouge":
                ranges |= _rouge_intervals(examples)
    return MetricResult(values, signatures, ranges)


def compare(
    value: str, baseline: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]
) -> Comparison:
    """Paired bootstrap test of two systems' outputs, 1,000 resamples.

    BLEU, chrF and TER by sacreBLEU's `PairedTest`; the others, which are means over the examples,
    by the same estimate, so that p means the same for every metric.

    Args:
        value: name of a value that `compute_metrics` yields.
        baseline, hypotheses, references: texts in the same order.

    Raises:
        ValueError: lists are empty or differ in length.
        UserError: there is no such value.
    """
    _check_texts(hypotheses, references)
    _check_texts(baseline, references)
    if value in _SACREBLEU:
        (first, second), signature = _sacrebleu_bootstrap(value, [baseline, hypotheses], references)
        # sacreBLEU calls a difference of 0 significant, even that of a system to itself.
        p_value = 1.0 if first.score == second.score else second.p_value
        return Comparison(first.score, second.score, p_value, signature)
    metric = "rouge" if value in _ROUGE_TYPES else value
    check_metrics([metric])
    pairs = [_example_scores(metric, texts, references) for texts in (baseline, hypotheses)]
    first, second = (np.asarray(examples[value]) for examples, _ in pairs)
    rng = np.random.default_rng(_SEED)
    indices = rng.choice(len(first), size=(_RESAMPLES, len(first)))
    differences = np.abs((second - first)[indices].mean(axis=1))
    difference = abs(second.mean() - first.mean())
    extreme = differences - differences.mean() > difference
    return Comparison(
        float(first.mean()),
        float(second.mean()),
        1.0 if difference == 0 else (int(extreme.sum()) + 1) / (_RESAMPLES + 1),
        f"{pairs[0][1]}|bs:{_RESAMPLES}|seed:{_SEED}",
    )


def tokenized_warning(hypotheses: Sequence[str], references: Sequence[str]) -> str | None:
    """Says so if texts look tokenised or split into subwords: their BLEU would mean something else.

    A sign is `@@` or `▁`, or commas and full stops that stand apart from the word before them: at
    least five of them, and a fifth of all.
    """
    problems = []
    for texts, what in ((hypotheses, "hypotheses"), (references, "references")):
        marked = sum("@@ " in text or "\N{LOWER ONE EIGHTH BLOCK}" in text for text in texts)
        apart = sum(len(re.findall(r"\s[,.](?=\s|$)", text)) for text in texts)
        attached = sum(len(re.findall(r"\w[,.](?=\s|$)", text)) for text in texts)
        if marked:
            problems.append(f"{marked} of {len(texts)} {what} have subword marks (@@ or ▁)")
        elif apart >= max(5, 0.2 * (apart + attached)):
            problems.append(f"{apart} of {apart + attached} commas and stops of the {what} stand "
                            "apart from the word before them")  # fmt: skip
    if not problems:
        return None
    return f"{'; '.join(problems)}: score detokenised text, or the scores cannot be compared."


def script_warning(metrics: Iterable[str], references: Sequence[str]) -> str | None:
    """Says so if ROUGE is asked for and most texts have nothing that it counts.

    rouge-score's tokens are Latin letters without accents, and digits.
    """
    if "rouge" not in metrics:
        return None
    unseen = sum(re.search("[a-z0-9]", text.lower()) is None for text in references)
    if 2 * unseen <= len(references):
        return None
    return (
        f"{unseen} of {len(references)} references have none of the letters a to z and digits that "
        "ROUGE counts: their ROUGE is 0. Go by the validation loss, BLEU or chrF."
    )


def newline_warning(
    metrics: Iterable[str], hypotheses: Sequence[str], references: Sequence[str]
) -> str | None:
    """Says so if ROUGE-Lsum compares texts of one line with texts of several."""
    if "rouge" not in metrics or any("\n" in text for text in hypotheses):
        return None
    several = sum("\n" in text for text in references)
    if 2 * several <= len(references):
        return None
    return (
        f"{several} of {len(references)} references have several lines, no hypothesis has: "
        "ROUGE-Lsum, which scores line by line, is too low. The vocabulary may have no newline."
    )


def _check_texts(hypotheses, references):
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses for {len(references)} references")
    if not hypotheses:
        raise ValueError("no texts to score")


def _in_lines(texts):
    """As a file for the `sacrebleu` command has them. It would join what a "-\\n" divides."""
    return [text.replace("\n", " ") for text in texts]


def _sacrebleu_bootstrap(name, systems, references):
    """(results of the paired bootstrap of one system or of two, the second's with p; signature)."""
    named = [(str(index), _in_lines(texts)) for index, texts in enumerate(systems)]
    metrics = {name: _SACREBLEU[name](references=[_in_lines(references)])}
    signatures, scores = PairedTest(named, metrics, None, "bs", _RESAMPLES)()
    ((column, signature),) = signatures.items()
    return scores[column], str(signature)


def _example_scores(
    metric: str, hypotheses: Sequence[str], references: Sequence[str]
) -> tuple[dict[str, list[float]], str]:
    """{value: score x 100 of every example} of a metric that is a mean over examples."""
    pairs = list(zip(hypotheses, references, strict=True))
    if metric == "exact_match":
        equal = [100.0 * (hypothesis == reference) for hypothesis, reference in pairs]
        return {"exact_match": equal}, "nrefs:1|case:mixed|tok:none"
    scorer = rouge_scorer.RougeScorer(_ROUGE_TYPES, use_stemmer=True, split_summaries=False)
    scores = [scorer.score(target=reference, prediction=text) for text, reference in pairs]
    version = importlib.metadata.version("rouge-score")
    signature = (
        "nrefs:1|measure:f1|average:examples|stemmer:porter|tok:rouge-score|lsum:newline"
        f"|version:rouge-score-{version}"
    )
    return {
        name: [100 * score[name].fmeasure for score in scores] for name in _ROUGE_TYPES
    }, signature


def _rouge_intervals(examples: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    aggregator = scoring.BootstrapAggregator(confidence_interval=0.95, n_samples=_RESAMPLES)
    names = list(examples)
    for row in zip(*examples.values(), strict=True):
        aggregator.add_scores(
            {
                name: scoring.Score(precision=score, recall=score, fmeasure=score)
                for name, score in zip(names, row, strict=True)
            }
        )
    with _numpy_seed(_SEED):
        found = aggregator.aggregate()
    return {name: (float(a.low.fmeasure), float(a.high.fmeasure)) for name, a in found.items()}


@contextlib.contextmanager
def _numpy_seed(seed: int) -> Iterator[Any]:
    """rouge-score draws from NumPy's global generator, whose state is left as it was."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)

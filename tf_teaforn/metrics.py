"""BLEU, ROUGE and exact match of a list of texts, each with a signature that makes it reproducible.

BLEU is sacreBLEU's (Post, 2018, "A Call for Clarity in Reporting BLEU Scores"); ROUGE is
rouge-score's (Lin, 2004, "ROUGE: A Package for Automatic Evaluation of Summaries").
"""

import dataclasses
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence

import sacrebleu
from rouge_score import rouge_scorer

from tf_teaforn.errors import UserError

_ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


@dataclasses.dataclass(frozen=True)
class MetricResult:
    """Values (all between 0 and 100) and, under the same names, how they were computed."""

    values: Mapping[str, float]
    signatures: Mapping[str, str]


def compute_metrics(
    names: Iterable[str], hypotheses: Sequence[str], references: Sequence[str]
) -> MetricResult:
    """Scores hypotheses against one reference each.

    Args:
        names: any of "bleu" (corpus BLEU with 13a tokens, mixed case), "rouge" (F-measure x 100 of
            rouge1, rouge2, rougeL and rougeLsum, Porter stemmer on, mean over the examples; lines
            are the sentences of rougeLsum) and "exact_match" (percent of equal texts).
        hypotheses, references: texts in the same order; a newline separates sentences.

    Raises:
        ValueError: the two lists are empty or differ in length.
        UserError: a name is not a metric.
    """
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses for {len(references)} references")
    if not hypotheses:
        raise ValueError("no texts to score")
    values: dict[str, float] = {}
    signatures: dict[str, str] = {}
    for name in names:
        if name not in _METRICS:
            raise UserError(f"there is no metric {name!r}; choose from {', '.join(_METRICS)}")
        scores, signature = _METRICS[name](hypotheses, references)
        values.update(scores)
        signatures.update(dict.fromkeys(scores, signature))
    return MetricResult(values, signatures)


def _bleu(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[dict[str, float], str]:
    metric = sacrebleu.BLEU(tokenize="13a")
    score = metric.corpus_score(hypotheses, [references]).score
    return {"bleu": score}, str(metric.get_signature())


def _rouge(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[dict[str, float], str]:
    scorer = rouge_scorer.RougeScorer(_ROUGE_TYPES, use_stemmer=True, split_summaries=False)
    totals = dict.fromkeys(_ROUGE_TYPES, 0.0)
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        for name, score in scorer.score(target=reference, prediction=hypothesis).items():
            totals[name] += score.fmeasure
    version = importlib.metadata.version("rouge-score")
    signature = (
        "nrefs:1|measure:f1|average:examples|stemmer:porter|tok:rouge-score|lsum:newline"
        f"|version:rouge-score-{version}"
    )
    return {name: 100 * total / len(references) for name, total in totals.items()}, signature


def _exact_match(
    hypotheses: Sequence[str], references: Sequence[str]
) -> tuple[dict[str, float], str]:
    equal = sum(map(str.__eq__, hypotheses, references))
    return {"exact_match": 100 * equal / len(references)}, "nrefs:1|case:mixed|tok:none"


_METRICS: Mapping[str, Callable] = {"bleu": _bleu, "rouge": _rouge, "exact_match": _exact_match}

"""Log probabilities that a trained model gives to target sentences, teacher-forced.

    bin/score --model_dir=runs/demo_enfr --source=test.en --target=test.fr > scores.tsv

A line for each pair: natural-log probability, number of tokens with end of sentence, perplexity,
separated by tabs. The corpus' figures follow on standard error.
"""

import math
import sys

from absl import flags

from tf_teaforn.cli import app
from tf_teaforn.cli.decode import read_lines, warn_of_cuts
from tf_teaforn.errors import UserError


def define_flags(values):
    """Flags of bin/score."""
    app.define_model_flags(values)
    app.define_batch_size(values)
    flags.DEFINE_string("source", None, "Source sentences, one a line.", flag_values=values)
    flags.DEFINE_string("target", None, "Their targets, line by line.", flag_values=values)


def score(values):
    """Runs the command."""
    model_dir = app.required(values, "model_dir")
    if values.source == values.target == "-":
        raise UserError(
            "--source=- --target=-: standard input can be read once only. Name a file for one."
        )
    sources, targets = (read_lines(app.required(values, flag)) for flag in ("source", "target"))
    if len(sources) != len(targets):
        raise UserError(
            f"--source={values.source} has {len(sources)} lines, --target={values.target} has "
            f"{len(targets)}: they must be as many."
        )

    from tf_teaforn.inference import load

    translator = load(model_dir, values.checkpoint)
    translator.batch_size = values.batch_size
    scores, tokens = translator.score(sources, targets), translator.count_tokens(targets)
    warn_of_cuts(translator.cut_sources, len(sources), translator.max_source_length)
    warn_of_cuts(translator.cut_targets, len(sources), translator.max_target_length, "target")
    for log_probability, count in zip(scores, tokens, strict=True):
        print(f"{log_probability:.6f}\t{count}\t{_perplexity(log_probability, count):.4f}")
    total, count = float(scores.sum(dtype="float64")), int(tokens.sum())
    print(
        f"{len(sources)} lines, {count} tokens, log probability {total:.4f}, perplexity "
        f"{_perplexity(total, max(count, 1)):.4f}",
        file=sys.stderr,
    )


def _perplexity(log_probability, count):
    try:
        return math.exp(-log_probability / count)
    except OverflowError:
        return math.inf


def main():
    """Entry point."""
    app.run(define_flags, score, __doc__, backends=("tensorflow", "jax"))

"""A user's own sentence pairs.

    bin/train --task=text --model_dir=DIR --train_files=train.tsv --valid_files=valid.tsv \\
        --test_files=test.tsv --metric=bleu

Each of the three is one file of `source<TAB>target` lines, or two files of as many lines,
`--train_files=train.en,train.fr`; names that end in .gz are unpacked on the way. What is checked
and how lines are read: `tf_teaforn.data.sources.TextSource`.

Defaults suit some hundred thousand sentence pairs and one machine.
"""

from tf_teaforn.data.sources import TextSource
from tf_teaforn.errors import UserError
from tf_teaforn.task import Task, register_task

_HEADLINES = {"bleu": "bleu", "chrf": "chrf", "rouge": "rougeL"}


def text_task(train_files="", valid_files="", test_files="", metric="bleu"):
    """The task "text" on these files.

    Args:
        train_files, valid_files, test_files: one TSV path, or "source,target"; empty: none, and an
            error when that split is asked for.
        metric: "bleu" (translation), "chrf" (the same, into languages written without spaces
            between words) or "rouge" (summaries; ROUGE-L picks the best checkpoint, and long
            examples are cut in training rather than left out).

    Raises:
        UserError: unknown metric, or neither one file nor two.
    """
    if metric not in _HEADLINES:
        raise UserError(f"Unknown --metric={metric}. Write one of: {', '.join(_HEADLINES)}.")
    return Task(
        name="text",
        description="your own files: --train_files --valid_files --test_files --metric",
        source=TextSource(train_files, valid_files, test_files),
        metrics=(metric,),
        headline_metric=_HEADLINES[metric],
        defaults={
            "model": "transformer_small",
            "n": 2,
            "discount": 0.5,
            "shared": True,
            "train_steps": 100_000,
            "eval_every": 1_000,
            "batch_tokens": 4_096,
            "vocab_size": 8_000,
            "max_source_length": 256,
            # Batches have the shape of these two: translations are as long as their sources.
            "max_target_length": 128 if metric == "rouge" else 256,
            "optimizer": "adam",
            "schedule": "inverse_sqrt",
            "warmup_steps": 4_000,
            "learning_rate": 1e-3,
            "label_smoothing": 0.1,
            "beam_size": 4,
            "beam_alpha": 0.6,
        },
        from_files=text_task,
        truncate=metric == "rouge",
    )


register_task(text_task())

"""Gigaword: the first sentence of an article to its headline, from TFDS.

    python -c "import tensorflow_datasets as tfds
    tfds.builder('gigaword').download_and_prepare()"
    bin/train --task=gigaword --model_dir=DIR

Expected (paper, Table 5; PEGASUS large, pretrained on HugeNews, n=3), ROUGE-1/2/L:

    beam 8 39.16 / 20.16 / 36.54

From scratch, as here without a pretrained model, expect less.

The data are lower-cased, with every digit written `#` and rare words `UNK` (`<unk>` in older
versions). To the model all of that is text: `<unk>` is rewritten to `UNK` here, so that it is never
taken for the vocabulary's unknown token, and `#` is in no token of ours with a meaning. Scores do
not depend on it: rouge-score keeps letters and digits only, in lower case, so that `<unk>` and
`UNK` are both its word `unk`, and `#` is dropped from both sides.

Lengths, Adafactor, its rate, warm-up and smoothing follow PEGASUS, as does the batch of its paper,
about 256 examples. The length penalty is the published PEGASUS model's. Of the 189,651 validation
examples training scores the first 1,000, as PEGASUS does; `--eval_examples=0` takes all.
"""

from tf_teaforn.data.sources import TfdsSource
from tf_teaforn.task import Task, register_task


def unk_as_text(source, target):
    """Writes the data's `<unk>` as `UNK`. Scalar tf.string tensors in and out."""
    import tensorflow as tf

    return tuple(tf.strings.regex_replace(side, "<unk>", "UNK") for side in (source, target))


register_task(
    Task(
        name="gigaword",
        description="Gigaword headlines: one sentence to its headline (TFDS)",
        source=TfdsSource("gigaword", "document", "summary", preprocess=unk_as_text),
        metrics=("rouge",),
        headline_metric="rougeL",
        defaults={
            "model": "transformer_base",
            "n": 3,
            "discount": 0.5,
            "shared": True,
            "train_steps": 160_000,
            "eval_every": 1_000,
            "eval_examples": 1_000,
            "keep": 5,
            # 256 examples of usual length.
            "batch_tokens": 256 * 48,
            "vocab_size": 32_000,
            "max_source_length": 128,
            "max_target_length": 32,
            "decode_length": 32,
            "optimizer": "adafactor",
            "schedule": "inverse_sqrt",
            "warmup_steps": 10_000,
            "learning_rate": 1e-4,
            "label_smoothing": 0.1,
            "beam_size": 8,
            "beam_alpha": 0.6,
        },
        truncate=True,
    )
)

"""CNN/DailyMail: a news article to its bullet points, from TFDS.

    python -c "import tensorflow_datasets as tfds
    tfds.builder('cnn_dailymail').download_and_prepare()"
    bin/train --task=cnn_dailymail --model_dir=DIR

Expected (paper, Table 5; PEGASUS large, pretrained on HugeNews, n=3), ROUGE-1/2/Lsum:

    beam 8 44.20 / 21.70 / 41.32

From scratch, as here without a pretrained model, expect less.

Bullet points are lines: "\\n" separates them in a text, `<n>` in tokens and files. ROUGE-Lsum,
which scores line by line, is what the literature calls ROUGE-L on this set, and picks the best
checkpoint; plain `rougeL` is some ten points lower.

An article longer than 1,024 tokens is cut there, in training too, as PEGASUS does it.

Lengths, Adafactor, its rate, warm-up and smoothing follow PEGASUS, as does the batch of its paper,
about 256 examples; where it does not fit, `--micro_batch_tokens` computes it in parts. The length
penalty is the published PEGASUS model's. Of the 13,368 validation examples training scores the
first 1,000, as PEGASUS does; `--eval_examples=0` takes all.
"""

from tf_teaforn.data.sources import TfdsSource
from tf_teaforn.task import Task, register_task

register_task(
    Task(
        name="cnn_dailymail",
        description="CNN/DailyMail: a news article to its bullet points (TFDS)",
        source=TfdsSource("cnn_dailymail", "article", "highlights"),
        metrics=("rouge",),
        headline_metric="rougeLsum",
        defaults={
            "model": "transformer_base",
            "n": 3,
            "discount": 0.5,
            "shared": True,
            "train_steps": 400_000,
            "eval_every": 1_000,
            "eval_examples": 1_000,
            "keep": 5,
            "batch_tokens": 256 * 1024,
            "vocab_size": 32_000,
            "max_source_length": 1024,
            "max_target_length": 128,
            "decode_length": 128,
            "optimizer": "adafactor",
            "schedule": "inverse_sqrt",
            "warmup_steps": 10_000,
            "learning_rate": 1e-3,
            "label_smoothing": 0.1,
            "beam_size": 8,
            "beam_alpha": 0.8,
        },
        truncate=True,
    )
)

"""Sentences composed from the locale data of installed libraries: the first task to try.

    bin/train --task=demo_enfr --n=2 --model_dir=runs/demo_enfr
    bin/train --task=demo_ende --n=2 --model_dir=runs/demo_ende

Expected: see README. Nothing is downloaded: `demo_generator` makes 20,000 training, 500 validation
and 500 test pairs of 4 to 16 words in seconds. Dates, times of day and spelled-out numbers of one
split do not occur in another.
"""

from collections.abc import Callable
from importlib.metadata import version

from tasks import demo_generator
from tf_teaforn.data.sources import GeneratedSource
from tf_teaforn.task import Task, register_task


def english_french(split: str) -> list[tuple[str, str]]:
    return demo_generator.pairs("fr", split)


def english_german(split: str) -> list[tuple[str, str]]:
    return demo_generator.pairs("de", split)


def _demo(name: str, language: str, pairs: Callable[[str], list[tuple[str, str]]]) -> Task:
    return Task(
        name=name,
        description=f"English-{language} phrases (dates, numbers, money, ...), made on the spot",
        source=GeneratedSource(
            pairs,
            # The locale data, and the sentences with them, change between releases.
            version=f"{name}-{demo_generator.VERSION}"
            f"-babel-{version('babel')}-num2words-{version('num2words')}",
        ),
        metrics=("bleu", "exact_match"),
        headline_metric="bleu",
        defaults={
            "model": "transformer_tiny",
            "n": 2,
            "discount": 0.5,
            "shared": True,
            "train_steps": 1000,
            "eval_every": 250,
            "batch_tokens": 4096,
            "vocab_size": 2000,
            "max_source_length": 64,
            "max_target_length": 64,
            "optimizer": "adam",
            "schedule": "linear",
            "warmup_steps": 200,
            "learning_rate": 2e-3,
            "label_smoothing": 0.1,
            "beam_size": 4,
            "beam_alpha": 0.6,
        },
    )


register_task(_demo("demo_enfr", "French", english_french))
register_task(_demo("demo_ende", "German", english_german))

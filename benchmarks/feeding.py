"""What the input pipeline feeds beside what training consumes: target tokens a second.

    python benchmarks/feeding.py                                   # the built-in demo's sentences
    python benchmarks/feeding.py --train_files=train.tsv.gz --max_length=64

transformer_tiny with N = 1, which consumes faster than any other model or setting of ours, on this
machine's CPU. For each way of batching the pipeline and the training step take turns, several
times; the table has medians, their ratio, and the share of either side's ids that is padding over a
whole epoch. The time to plan an epoch is without reading data.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contender import print_table  # noqa: E402

_MODES = ("bucket", "pack", "fixed")


def padding(cache, plan):
    """Shares of padding of an epoch's source and target ids."""
    batches = plan.epoch(0)
    return [
        1 - int(lengths.sum()) / sum(batch.rows * getattr(batch, side) for batch in batches)
        for side, lengths in (
            ("source_length", cache.source_lengths),
            ("target_length", cache.target_lengths),
        )
    ]


def tokens_per_second(run_step, seconds):
    """Of `run_step()`, which returns the target tokens of one step."""
    start, tokens = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        tokens += run_step()
    return tokens / elapsed


def measure(cache, vocabulary_size, mode, options):
    """One row of the table."""
    import keras

    from tf_teaforn.data import pipeline
    from tf_teaforn.models.catalog import build_model
    from tf_teaforn.teaforn import TeaForN
    from tf_teaforn.tf_backend.step_runner import StepRunner
    from tf_teaforn.tf_backend.strategy import make_strategy

    arguments = dict(mode=mode, batch_tokens=options.batch_tokens, seed=1)
    start = time.perf_counter()
    plan = pipeline.training_plan(cache, **arguments)
    plan.epoch(0)
    planning = time.perf_counter() - start
    dataset = pipeline.training_dataset(cache, **arguments)

    fed = iter(dataset)
    model = TeaForN(build_model("transformer_tiny", vocabulary_size), n=1)
    model.compile(optimizer=keras.optimizers.Adam(1e-3))
    runner = StepRunner(make_strategy("one"), model)
    consumed = runner.iterator(lambda shard: dataset)
    numbers = itertools.count(1)

    def feed():
        return float(next(fed)[2].numpy().sum())

    def train():
        runner.train(consumed, next(numbers))
        return runner.read_logs()["tokens"]

    for _ in range(3):
        train()
    rounds = [
        (tokens_per_second(feed, options.seconds), tokens_per_second(train, options.seconds))
        for _ in range(options.rounds)
    ]
    feeding, training = map(statistics.median, zip(*rounds, strict=True))
    source_padding, target_padding = padding(cache, plan)
    return {
        "batching": mode,
        "shape": "x".join(map(str, plan.shape[1:])) if plan.shape else "several",
        "source padding %": 100 * source_padding,
        "target padding %": 100 * target_padding,
        "planning s": planning,
        "fed tokens/s": feeding,
        "trained tokens/s": training,
        "ratio": feeding / training,
    }


def main():
    """Prints the table, then the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train_files", default="", help="a TSV file; default: the demo's pairs")
    parser.add_argument("--max_length", type=int, default=64)
    parser.add_argument("--vocab_size", type=int, default=2000)
    parser.add_argument("--batch_tokens", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    from tasks.text import text_task
    from tf_teaforn.data.cache import build_or_load
    from tf_teaforn.data.tokenizer import Tokenizer
    from tf_teaforn.task import get_task
    from tf_teaforn.training import build_vocabulary

    task = text_task(options.train_files) if options.train_files else get_task("demo_enfr")
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = f"{folder}/vocab.model"
        build_vocabulary(task, options.vocab_size, vocabulary)
        tokenizer = Tokenizer.load(vocabulary)
        lengths = (options.max_length, options.max_length)
        cache = build_or_load(folder, task.source, "train", tokenizer, *lengths, drop_long=True)
        rows = [measure(cache, tokenizer.vocabulary_size, mode, options) for mode in _MODES]
    print(f"{len(cache)} examples, at most {options.max_length} tokens a side")
    print_table(rows)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()

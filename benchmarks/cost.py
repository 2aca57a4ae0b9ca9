"""What TeaForN costs over teacher forcing: arithmetic, time and memory of a training step.

    python -m benchmarks.cost --output_dir=docs/results

1. Arithmetic of N = 2, 3 over N = 1 at the shapes of the paper's PEGASUS-large, counted in the
   lowered program with loops multiplied out, beside the closed formula (JAX; no weights are made).
2. Time of a step of N = 2, 3 over N = 1 on this CPU, beside the ratio of the arithmetic.
3. Target tokens a second against the batch size; memory of a step against vocabulary and N.

Writes cost.json and cost.png. Each measurement is in a process of its own.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# S, T: pre-training and fine-tuning; bounds of the ratios of N = 2 and 3 to N = 1.
PAPER_SHAPES = {
    "pre-training": (512, 256, (1.45, 1.90)),
    "fine-tuning": (1024, 128, (1.17, 1.33)),
}
PEGASUS_LARGE = {"num_layers": 16, "hidden_dim": 1024, "intermediate_dim": 4096}
PEGASUS_VOCABULARY = 96103
SMALL = {"num_layers": 2, "hidden_dim": 512, "intermediate_dim": 2048}
SMALL_SHAPE = {"source_length": 128, "target_length": 64, "vocabulary_size": 16000}
STAGES = (1, 2, 3)


def build(sizes, vocabulary_size, n, num_heads=8):
    """A compiled `TeaForN` with its optimizer's variables."""
    from tf_teaforn import TeaForN, build_model
    from tf_teaforn.config import TrainingConfig
    from tf_teaforn.optimizers import build_optimizer

    seq2seq = build_model(
        "transformer_base", vocabulary_size, num_heads=num_heads, dropout=0.1, **sizes
    )
    model = TeaForN(seq2seq, n=n)
    # SGD: what an optimizer takes does not grow with N and is none of TeaForN's cost.
    model.compile(optimizer=build_optimizer(TrainingConfig(optimizer="sgd")))
    model.optimizer.build(model.trainable_variables)
    return model


def count_arithmetic():
    """{shape: [(counted, closed formula) for N = 1, 2, 3]}, operations for a batch of one."""
    import jax

    from tf_teaforn.flops import training_flops
    from tf_teaforn.hlo import matmul_flops
    from tf_teaforn.jax_backend.strategy import training_variables

    counts = {}
    for name, (source, target, _) in PAPER_SHAPES.items():
        ids = {length: jax.ShapeDtypeStruct((1, length), "int32") for length in (source, target)}
        inputs = {"encoder_token_ids": ids[source], "decoder_token_ids": ids[target]}
        batch = inputs, ids[target], jax.ShapeDtypeStruct((1, target), "float32")
        counts[name] = []
        for n in STAGES:
            models = []
            # Shapes are enough: no weights are computed.
            jax.eval_shape(
                lambda n=n, models=models: models.append(
                    build(PEGASUS_LARGE, PEGASUS_VOCABULARY, n, num_heads=16)
                )
            )
            state = tuple(
                [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in part]
                for part in training_variables(models[0])
            )
            program = jax.jit(models[0].train_step).lower(state, batch).as_text("hlo")
            formula = training_flops(
                batch_size=1,
                source_length=source,
                target_length=target,
                vocabulary_size=PEGASUS_VOCABULARY,
                n=n,
                **PEGASUS_LARGE,
            )
            counts[name].append((matmul_flops(program), formula))
    return counts


def random_batch(batch_size, source_length, target_length, vocabulary_size):
    """(inputs, targets, weights) without padding."""
    import numpy as np

    random = np.random.default_rng(0)
    source, target = (
        random.integers(2, vocabulary_size, (batch_size, length), "int32")
        for length in (source_length, target_length)
    )
    inputs = {"encoder_token_ids": source, "decoder_token_ids": np.roll(target, 1, axis=1)}
    return inputs, target, np.ones(target.shape, "float32")


def compiled(n, vocabulary_size):
    import tensorflow as tf

    return tf.function(build(SMALL, vocabulary_size, n).train_step)


def measure_time(batch_size, rounds):
    """{n: seconds of each round's step}; the rounds go through all N in turn."""
    batch = random_batch(batch_size, **SMALL_SHAPE)
    steps = {n: compiled(n, SMALL_SHAPE["vocabulary_size"]) for n in STAGES}
    for step in steps.values():
        step(batch)
    seconds = {n: [] for n in STAGES}
    for _ in range(rounds):
        for n, step in steps.items():
            start = time.perf_counter()
            float(step(batch)["loss"])
            seconds[n].append(time.perf_counter() - start)
    return seconds


def measure_memory(batch_size, n, vocabulary_size):
    """Bytes that a step takes at most, weights and optimizer included."""
    import tensorflow as tf

    tf.function(lambda: tf.zeros(()))()
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    step = compiled(n, vocabulary_size)
    batch = random_batch(batch_size, **{**SMALL_SHAPE, "vocabulary_size": vocabulary_size})
    for _ in range(2):
        float(step(batch)["loss"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


MEASUREMENTS = {
    "arithmetic": count_arithmetic,
    "time": measure_time,
    "memory": measure_memory,
}


def in_a_process(name, *arguments, backend="tensorflow"):
    """The result of a measurement as JSON gives it back."""
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if backend == "jax":
        environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, "-m", "benchmarks.cost", "--measure", name]
    done = subprocess.run(
        [*command, *map(str, arguments)], cwd=ROOT, env=environment, stdout=subprocess.PIPE
    )
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


def ratios(values):
    return [value / values[0] for value in values]


def report_arithmetic():
    counts = in_a_process("arithmetic", backend="jax")
    results = {}
    print("Arithmetic of a step over that of N = 1    N = 2   N = 3   formula off by")
    for name, pairs in counts.items():
        counted, formula = zip(*pairs, strict=True)
        off = max(abs(a / b - 1) for a, b in pairs)
        source, target, bounds = PAPER_SHAPES[name]
        got = ratios(counted)
        label = f"{name}, S={source}, T={target}"
        print(f"{label:<40} {got[1]:>7.3f} {got[2]:>7.3f} {off:>15.2%}")
        results[name] = {
            "counted": counted,
            "formula": formula,
            "ratios": got,
            "bounds": bounds,
            "holds": off < 0.02 and all(a <= b for a, b in zip(got[1:], bounds, strict=True)),
        }
    return results


def report_time(batch_size, rounds):
    from tf_teaforn.flops import training_flops

    seconds = in_a_process("time", batch_size, rounds)
    # Each round's ratio by itself: what else the machine does changes from round to round.
    measured = [
        statistics.median(b / a for a, b in zip(seconds["1"], values, strict=True))
        for values in seconds.values()
    ]
    flops = [training_flops(batch_size=batch_size, n=n, **SMALL_SHAPE, **SMALL) for n in STAGES]
    expected = ratios(flops)
    print(f"\nOne step on this CPU, B={batch_size}   seconds   over N = 1   arithmetic   off by")
    for n, ratio, arithmetic in zip(STAGES, measured, expected, strict=True):
        middle = statistics.median(seconds[str(n)])
        off = ratio / arithmetic - 1
        print(f"N = {n}{middle:>30.3f}{ratio:>13.3f}{arithmetic:>13.3f}{off:>9.1%}")
    return {
        "seconds": seconds,
        "ratios": measured,
        "arithmetic": expected,
        "holds": all(abs(a / b - 1) < 0.1 for a, b in zip(measured, expected, strict=True)),
    }


def report_growth(batch_size, rounds, vocabularies):
    tokens = {}
    for size in (batch_size, 4 * batch_size):
        seconds = in_a_process("time", size, rounds)
        count = size * SMALL_SHAPE["target_length"]
        tokens[size] = {n: count / statistics.median(values) for n, values in seconds.items()}
    memory = {
        "vocabulary": {v: in_a_process("memory", batch_size, 1, v) for v in vocabularies},
        "n": {
            n: in_a_process("memory", batch_size, n, SMALL_SHAPE["vocabulary_size"])
            for n in (*STAGES, 4)
        },
    }
    print("\nTarget tokens a second")
    for size, values in tokens.items():
        print(f"B = {size:<6}" + "".join(f"   N = {n}: {v:8.0f}" for n, v in values.items()))
    print("\nMemory of a step")
    for axis, values in memory.items():
        for value, size in values.items():
            print(f"{axis} = {value:<8}{size / 2**20:>8.0f} MiB")
    return {"tokens_per_second": tokens, "memory": memory}


def plot(growth, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    tokens, memory = growth["tokens_per_second"], growth["memory"]

    def draw(axis, values, marks, **labels):
        # JSON has made text of numbers.
        places = list(map(int, values))
        axis.plot(places, list(values.values()), marks, **labels)
        axis.set_xticks(places, [f"{x // 1000}k" if x >= 1000 else str(x) for x in places])
        axis.set_xlim(0, 1.05 * max(places))
        axis.grid(alpha=0.3)

    for n, marks in zip(STAGES, ("o-", "s--", "^:"), strict=True):
        speeds = {size: values[str(n)] for size, values in tokens.items()}
        draw(axes[0], speeds, marks, label=f"N = {n}")
    axes[0].set(title="Speed", xlabel="batch size", ylabel="target tokens a second", ylim=0)
    axes[0].legend()
    for axis, name, title, label in (
        (axes[1], "vocabulary", "Memory against the vocabulary, N = 1", "vocabulary size"),
        (axes[2], "n", f"Memory against N, V = {SMALL_SHAPE['vocabulary_size']}", "N"),
    ):
        draw(axis, {value: size / 2**20 for value, size in memory[name].items()}, "o-")
        axis.set(title=title, xlabel=label, ylabel="memory of a step, MiB", ylim=0)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[8000, 16000, 32000, 64000])
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.measure:
        name, *arguments = flags.measure
        print(json.dumps(MEASUREMENTS[name](*map(int, arguments))))
        return
    results = {
        "arithmetic": report_arithmetic(),
        "time": report_time(flags.batch_size, flags.rounds),
        "growth": report_growth(flags.batch_size, flags.rounds, flags.vocabularies),
    }
    flags.output_dir.mkdir(parents=True, exist_ok=True)
    (flags.output_dir / "cost.json").write_text(json.dumps(results, indent=2))
    plot(results["growth"], flags.output_dir / "cost.png")


if __name__ == "__main__":
    main()

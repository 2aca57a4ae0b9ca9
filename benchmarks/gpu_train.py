"""Training on one GPU beside Hugging Face in PyTorch: target tokens a second, memory.

    python benchmarks/gpu_train.py --model=transformer_big --peers=peers/bin/python
    python benchmarks/gpu_train.py --model=pegasus_large --peers=peers/bin/python

Ours: JAX, N = 1, 2, 3, mixed_bfloat16, Adam, without TensorFlow being needed. The peers: Marian or
PEGASUS of the same sizes, eager and compiled, bfloat16 autocast, fused AdamW. Both draw dropout, at
the same places.
transformer_big: B=128, S=T=64, V=32000; pegasus_large: B=16, S=1024, T=128, V=96128. The share of
the card's peak counts the matrix products that training with teacher forcing needs, for N > 1 those
of N stages; nothing that is computed again. --toy: tiny sizes, on any machine, to try the script.
--contenders: some of ours:1, ours:2, ours:3, eager, compiled, to continue what was cut short.
Their environments:

    pip install 'jax[cuda13]>=0.10,<0.12' 'keras>=3.15,<3.16' 'keras-nlp==0.32.*'
    pip install 'torch==2.13.*' 'transformers==5.24.*'
"""

import argparse
import itertools
import json
import os
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contender import Contender, print_table, take_turns  # noqa: E402
from tf_teaforn.flops import training_flops  # noqa: E402

SHAPES = {
    "transformer_big": {
        "batch_size": 128,
        "source_length": 64,
        "target_length": 64,
        "vocabulary_size": 32000,
    },
    "pegasus_large": {
        "batch_size": 16,
        "source_length": 1024,
        "target_length": 128,
        "vocabulary_size": 96128,
    },
}
LAYERS = {"transformer_big": 6, "pegasus_large": 16}
SIZES = {"hidden_dim": 1024, "intermediate_dim": 4096}
HEADS = 16
TOY_SHAPE = {"batch_size": 4, "source_length": 16, "target_length": 8, "vocabulary_size": 100}
TOY_SIZES = {"hidden_dim": 32, "intermediate_dim": 64}
# Of the peers, at the places of ours.
_DROPOUT = {
    "transformer_big": {"dropout": 0.1, "attention_dropout": 0.0, "activation_dropout": 0.0},
    "pegasus_large": {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1},
}
# Dense bfloat16 operations a second (NVIDIA's data sheets), by the first part of the device's name
# that fits.
PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}


def sizes(model, toy):
    """(shape of a batch, sizes of the model): arguments of `training_flops`."""
    if toy:
        return TOY_SHAPE, {"num_layers": 1, **TOY_SIZES}
    return SHAPES[model], {"num_layers": LAYERS[model], **SIZES}


def token_ids(rows, length, vocabulary_size, seed):
    """Full rows of random ids, end of sentence included: int32."""
    import numpy as np

    ids = np.random.default_rng(seed).integers(2, vocabulary_size, (rows, length), dtype="int32")
    ids[:, -1] = 1
    return ids


def ours(name, toy, n):
    """(one update, waits for all updates, peak bytes, card) of our step under JAX."""
    import jax
    import keras
    import numpy as np

    from tf_teaforn import TeaForN, build_model
    from tf_teaforn.jax_backend.strategy import StepRunner, make_strategy

    if not toy and jax.devices()[0].platform != "gpu":
        sys.exit(f"JAX found no GPU but {jax.devices()[0].platform}: install jax[cuda13].")
    shape, model_sizes = sizes(name, toy)
    vocabulary_size = shape["vocabulary_size"]
    keras.utils.set_random_seed(0)
    strategy = make_strategy("one")
    with strategy.scope():
        seq2seq = build_model(name, vocabulary_size, dtype="mixed_bfloat16", **model_sizes)
        model = TeaForN(seq2seq, n=n)
        model.compile(optimizer=keras.optimizers.Adam(1e-4))
    sources, targets = (
        token_ids(shape["batch_size"], shape[length], vocabulary_size, seed)
        for seed, length in enumerate(("source_length", "target_length"))
    )
    inputs = {
        "encoder_token_ids": sources,
        "decoder_token_ids": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
    }
    runner = StepRunner(strategy, model)
    batch = runner.put((inputs, targets, np.ones(targets.shape, "float32")))

    numbers = itertools.count(1)

    def step():
        runner.train(iter([batch]), next(numbers))

    def wait():
        jax.block_until_ready([variable.value for variable in model.variables])

    def peak_bytes():
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)

    return step, wait, peak_bytes, jax.devices()[0].device_kind


def peer(name, toy, compiled):
    """The same of Hugging Face's model."""
    import torch
    import transformers

    if not toy and not torch.cuda.is_available():
        sys.exit("PyTorch found no GPU: install its build for CUDA.")
    shape, model_sizes = sizes(name, toy)
    config_class, model_class = {
        "transformer_big": (transformers.MarianConfig, transformers.MarianMTModel),
        "pegasus_large": (
            transformers.PegasusConfig,
            transformers.PegasusForConditionalGeneration,
        ),
    }[name]
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model_class(
        config_class(
            vocab_size=shape["vocabulary_size"],
            d_model=model_sizes["hidden_dim"],
            encoder_layers=model_sizes["num_layers"],
            decoder_layers=model_sizes["num_layers"],
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=model_sizes["intermediate_dim"],
            decoder_ffn_dim=model_sizes["intermediate_dim"],
            max_position_embeddings=1024,
            activation_function="relu",
            **_DROPOUT[name],
            scale_embedding=True,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
    )
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if compiled else model
    sources, targets = (
        torch.tensor(
            token_ids(shape["batch_size"], shape[length], shape["vocabulary_size"], seed),
            dtype=torch.long,
            device=device,
        )
        for seed, length in enumerate(("source_length", "target_length"))
    )
    mask = torch.ones_like(sources)

    def step():
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = run(input_ids=sources, attention_mask=mask, labels=targets).loss
        loss.backward()
        optimizer.step()

    def wait():
        if device == "cuda":
            torch.cuda.synchronize()

    def peak_bytes():
        return torch.cuda.max_memory_allocated() if device == "cuda" else 0

    return step, wait, peak_bytes, torch.cuda.get_device_name() if device == "cuda" else "cpu"


def measured(step, wait, peak_bytes, card, seconds):
    """A function that times steps for so many seconds; the first steps are made here."""
    for _ in range(3):
        step()
    wait()

    def measure():
        steps, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            for _ in range(5):
                step()
            wait()
            steps += 5
        per_step = (time.perf_counter() - start) / steps
        return {"seconds": per_step, "peak_bytes": peak_bytes(), "card": card}

    return measure


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=list(SHAPES), required=True)
    parser.add_argument("--peers", help="Python with torch and transformers")
    parser.add_argument("--contenders", help="names, separated by commas; default: all there are")
    parser.add_argument("--limit_s", type=float, default=300.0, help="of a contender, in all")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn; each has three")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        name, _, n = arguments.contender.partition(":")
        if name == "ours":
            parts = ours(arguments.model, arguments.toy, int(n))
        else:
            parts = peer(arguments.model, arguments.toy, name == "compiled")
        take_turns(measured(*parts, arguments.seconds))
        return

    pythons = {f"ours:{n}": sys.executable for n in (1, 2, 3)}
    if arguments.peers:
        if not shutil.which(arguments.peers):
            parser.error(f"--peers={arguments.peers}: there is no such program")
        pythons |= {"eager": arguments.peers, "compiled": arguments.peers}
    if arguments.contenders:
        names = arguments.contenders.split(",")
        if not set(names) <= set(pythons):
            parser.error(f"--contenders={arguments.contenders}: there are {', '.join(pythons)}")
        pythons = {name: pythons[name] for name in names}
    shape, model_sizes = sizes(arguments.model, arguments.toy)
    # Neither the environment's choice of a backend nor a package that is there counts.
    environment = {"KERAS_BACKEND": "jax", "USE_TF": "0", "OMP_NUM_THREADS": str(os.cpu_count())}
    rows, records, stopped = [], {}, []
    for name, python in pythons.items():
        options = [f"--contender={name}", f"--model={arguments.model}"]
        options += [f"--seconds={arguments.seconds}"] + ["--toy"] * arguments.toy
        # One after the other: each has the card's memory to itself.
        try:
            command = [python, __file__, *options]
            contender = Contender(name, command, environment, arguments.limit_s)
            for _ in range(3):
                contender.turn()
        except (RuntimeError, OSError) as error:
            # Out of memory or time, for example: the others have a machine to make use of.
            print(error, file=sys.stderr, flush=True)
            stopped.append(name)
            continue
        contender.stop()
        records[name] = contender.measured
        seconds, card = contender.median("seconds"), contender.measured[0]["card"]
        n = int(name.partition(":")[2] or 1)
        flops = training_flops(**shape, **model_sizes, n=n)
        peak = next((peak for part, peak in PEAKS.items() if part in card), None)
        rows.append(
            {
                "name": name,
                "target tokens/s": shape["batch_size"] * shape["target_length"] / seconds,
                "ms a step": 1000 * seconds,
                "times the first": seconds / (rows[0]["ms a step"] / 1000 if rows else seconds),
                "peak GiB": contender.median("peak_bytes") / 2**30,
                "TFLOP/s": flops / seconds / 1e12,
                "of the peak": flops / seconds / peak if peak else "?",
                "card": card,
            }
        )
        print(json.dumps({name: rows[-1]}), flush=True)
    if rows:
        print_table(rows)
    print(json.dumps(records))
    sys.exit(1 if stopped else 0)


if __name__ == "__main__":
    main()

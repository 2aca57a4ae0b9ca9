"""Training speed on a CPU beside Hugging Face's Marian and OpenNMT-tf: target tokens a second.

    python benchmarks/train.py --peers=peers/bin/python --opennmt=onmt/bin/python

Transformer-base, B=16, S=T=64, V=32000, float32, Adam, ReLU, dropout 0.1 on embeddings and on the
outputs of sublayers alone, random weights, two threads; ours is the step that bin/train runs, under
TensorFlow, for N = 1, 2, 3. "as_is" is N = 1 where malloc hands freed memory back, which bin/train
has it keep; the peers run as they come. The contenders take turns. Environments, on Python 3.11:

    pip install 'torch==2.13.*' 'transformers==5.24.*'
    pip install OpenNMT-tf==2.32.0 tensorflow-cpu==2.13.1 numpy==1.24.3 'setuptools<70'

OpenNMT-tf needs TensorFlow 2.13 or older, which is not there for newer Pythons. Without a flag its
contender is left out.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contender import Contender, print_table, take_turns  # noqa: E402

BATCH, LENGTH, VOCABULARY = 16, 64, 32000
SIZES = {"num_layers": 6, "hidden_dim": 512, "intermediate_dim": 2048, "num_heads": 8}


def token_ids(seed):
    """Full rows of random ids, end of sentence included: int32 [B, 64]."""
    import numpy as np

    ids = np.random.default_rng(seed).integers(2, VOCABULARY, (BATCH, LENGTH), dtype="int32")
    ids[:, -1] = 1
    return ids


def measured(step, steps):
    """A function that times `steps` calls of `step`; the first call is made here."""
    step()

    def measure():
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return {"tokens_per_second": steps * BATCH * LENGTH / (time.perf_counter() - start)}

    return measure


def ours(n):
    """The train step of bin/train."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tf_teaforn import TeaForN, build_model
    from tf_teaforn.cli.malloc import keep_freed_memory
    from tf_teaforn.config import TrainingConfig
    from tf_teaforn.optimizers import build_optimizer
    from tf_teaforn.tf_backend.step_runner import StepRunner
    from tf_teaforn.tf_backend.strategy import make_strategy

    keep_freed_memory()
    keras.utils.set_random_seed(0)
    model = TeaForN(build_model("transformer_base", VOCABULARY, dropout=0.1), n=n)
    model.compile(optimizer=build_optimizer(TrainingConfig(optimizer="adam", learning_rate=1e-4)))
    targets = token_ids(1)
    inputs = {
        "encoder_token_ids": token_ids(0),
        "decoder_token_ids": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
    }
    batch = inputs, targets, np.ones(targets.shape, "float32")
    runner = StepRunner(make_strategy("one"), model)
    batches = runner.iterator(lambda shard: tf.data.Dataset.from_tensors(batch).repeat())
    numbers = itertools.count(1)

    def step():
        runner.train(batches, next(numbers))
        # Waits for the update.
        float(model.metrics[0].result())

    return step


def marian(threads):
    """Hugging Face's MarianMTModel of the same sizes."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=VOCABULARY,
            d_model=SIZES["hidden_dim"],
            encoder_layers=SIZES["num_layers"],
            decoder_layers=SIZES["num_layers"],
            encoder_attention_heads=SIZES["num_heads"],
            decoder_attention_heads=SIZES["num_heads"],
            encoder_ffn_dim=SIZES["intermediate_dim"],
            decoder_ffn_dim=SIZES["intermediate_dim"],
            max_position_embeddings=LENGTH,
            activation_function="relu",
            dropout=0.1,
            attention_dropout=0.0,
            activation_dropout=0.0,
            scale_embedding=True,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
    ).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    sources, targets = (torch.tensor(token_ids(seed), dtype=torch.long) for seed in (0, 1))
    mask = torch.ones_like(sources)

    def step():
        optimizer.zero_grad()
        loss = model(input_ids=sources, attention_mask=mask, labels=targets).loss
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def opennmt():
    """OpenNMT-tf's TransformerBase with one table for both languages and the softmax."""
    import opennmt
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "vocabulary")
        # Its own start, end and padding come first; it adds one id for unknown words.
        words = ["<blank>", "<s>", "</s>", *(f"w{i}" for i in range(VOCABULARY - 4))]
        Path(path).write_text("\n".join(words) + "\n")
        model = opennmt.models.Transformer(
            opennmt.inputters.WordEmbedder(embedding_size=SIZES["hidden_dim"]),
            opennmt.inputters.WordEmbedder(embedding_size=SIZES["hidden_dim"]),
            num_layers=SIZES["num_layers"],
            num_units=SIZES["hidden_dim"],
            num_heads=SIZES["num_heads"],
            ffn_inner_dim=SIZES["intermediate_dim"],
            dropout=0.1,
            attention_dropout=0.0,
            ffn_dropout=0.0,
            share_embeddings=opennmt.models.EmbeddingsSharingLevel.ALL,
        )
        model.initialize(
            {"source_vocabulary": path, "target_vocabulary": path}, params={"label_smoothing": 0.1}
        )
    lengths = tf.fill([BATCH], LENGTH)
    sources, targets = (tf.constant(token_ids(seed)) for seed in (0, 1))
    features = {"ids": sources, "length": lengths}
    labels = {
        "ids": tf.pad(targets[:, :-1], [[0, 0], [1, 0]], constant_values=1),
        "ids_out": targets,
        "length": lengths,
    }
    optimizer = tf.keras.optimizers.legacy.Adam(1e-4)
    model.create_variables(optimizer=optimizer)

    @tf.function
    def train():
        return model.train(features, labels, optimizer)

    return lambda: tf.nest.map_structure(lambda x: x.numpy(), train())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", help="Python with torch and transformers")
    parser.add_argument("--opennmt", help="Python with OpenNMT-tf")
    parser.add_argument("--n", default="1,2,3", help="numbers N of decoders, of ours")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        name, _, n = arguments.contender.partition(":")
        step = {
            "ours": lambda: ours(int(n)),
            "as_is": lambda: ours(1),
            "opennmt": opennmt,
            "marian": lambda: marian(arguments.threads),
        }[name]()
        take_turns(measured(step, arguments.steps))
        return

    names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
    environment = dict.fromkeys(names, str(arguments.threads))
    environment |= {"TF_NUM_INTEROP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    pythons = {f"ours:{n}": sys.executable for n in arguments.n.split(",")}
    pythons |= {"as_is": sys.executable, "marian": arguments.peers, "opennmt": arguments.opennmt}
    contenders = [
        Contender(
            name,
            [python, __file__, f"--contender={name}"]
            + [f"--{option}={getattr(arguments, option)}" for option in ("steps", "threads")],
            # Off by default, too: its presence alone leaves malloc as it is.
            environment | ({"MALLOC_PERTURB_": "0"} if name == "as_is" else {}),
        )
        for name, python in pythons.items()
        if python
    ]
    for turn in range(arguments.rounds):
        for contender in contenders:
            contender.turn()
        speeds = {c.name: round(c.measured[-1]["tokens_per_second"]) for c in contenders}
        print(f"round {turn + 1}: {json.dumps(speeds)}", flush=True)
    first = contenders[0].median("tokens_per_second")
    rows = []
    for contender in contenders:
        contender.stop()
        speed = contender.median("tokens_per_second")
        rows.append(
            {"name": contender.name, "target tokens/s": speed, "of the first": speed / first}
        )
    print_table(rows)
    print(json.dumps({c.name: [m["tokens_per_second"] for m in c.measured] for c in contenders}))


if __name__ == "__main__":
    main()

"""Search on the CPU against Hugging Face `generate` and CTranslate2: tokens a second.

    python benchmarks/decode.py --peers=.venv-peers/bin/python

Same weights, same sentences, float32, no length penalty; the end of sentence is suppressed, so that
all outputs are equally long. Sizes of transformer_base (post-norm with biases, which is what the
peers' Marian has), 32,000 subwords. Rounds alternate between the programs; medians. The head of
decode_peers.py has the command that makes the peers' environment; without --peers ours runs alone.

Also: time a token at length 256 against 64, the exported SavedModel against the same search
in-process, and a server's first request with and without a warm-up request before it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contender import Contender  # noqa: E402

VOCABULARY_SIZE = 32000
NUM_HEADS = 8
SOURCE_LENGTH = 24
LENGTH, LONG_LENGTH = 64, 256
CELLS = ((1, 1), (1, 4), (32, 1), (32, 4))
PEERS = ("transformers", "ctranslate2")

# What a server does with an export, in a process of its own. Arguments: folder, ids.
FIRST_REQUEST = """
import json, sys, time
import tensorflow as tf, tensorflow_text
start = time.perf_counter()
answer = tf.saved_model.load(sys.argv[1]).signatures["token_ids"]
seconds = {"load": time.perf_counter() - start}
ids = json.loads(sys.argv[2])
for name in ("first", "after one warm-up", "after two"):
    start = time.perf_counter()
    answer(inputs=tf.constant(ids, tf.int32))["outputs"].numpy()
    seconds[name] = time.perf_counter() - start
    ids = [ids[0][1:]]
print(json.dumps(seconds))
"""


def sentences(batch):
    """int32 [B, S], ended in end-of-sentence."""
    ids = np.random.default_rng(batch).integers(3, VOCABULARY_SIZE, size=(batch, SOURCE_LENGTH))
    ids[:, -1] = 1
    return ids.astype("int32")


def timed(function, *args):
    """(seconds, token ids as an array)."""
    start = time.perf_counter()
    found = function(*args)
    tokens = np.asarray(found.token_ids if hasattr(found, "token_ids") else found["outputs"])
    return time.perf_counter() - start, tokens


def search_config(beam_size, length):
    """Search for exactly `length` tokens."""
    from tf_teaforn.decoding import SearchConfig

    return SearchConfig(beam_size, 0.0, max_length=length, min_length=length)


def measure_searches(model, peers, rounds):
    """One dictionary a cell: medians, ratios, and how many tokens agree with ours."""
    from tf_teaforn.tf_backend.inference import search_function

    results = []
    for batch, beam_size in CELLS:
        ids = sentences(batch)
        ours = {
            n: search_function(model, search_config(beam_size, n)) for n in (LENGTH, LONG_LENGTH)
        }
        seconds = {"ours": [], "ours_long": [], **{name: [] for name in PEERS if peers}}
        agreement = {}
        request = {"source_ids": ids.tolist(), "beam_size": beam_size, "length": LENGTH}
        ours[LENGTH](ids), ours[LONG_LENGTH](ids)
        for name in PEERS if peers else ():
            peers.turn(peer=name, **request)
        for _ in range(rounds):
            took, tokens = timed(ours[LENGTH], ids)
            seconds["ours"].append(took)
            for name in PEERS if peers else ():
                answer = peers.turn(peer=name, **request)
                seconds[name].append(answer["seconds"])
                theirs = np.array(answer["tokens"])[:, :LENGTH]
                agreement[name] = float((theirs == tokens[:, 0, : theirs.shape[1]]).mean())
            seconds["ours_long"].append(timed(ours[LONG_LENGTH], ids)[0])
        median = {name: statistics.median(values) for name, values in seconds.items()}
        result = {"batch": batch, "beam_size": beam_size}
        result["ours"] = batch * LENGTH / median["ours"]
        for name in PEERS if peers else ():
            result[name] = batch * LENGTH / median[name]
            result[f"ours/{name}"] = median[name] / median["ours"]
            result[f"tokens as {name}"] = agreement[name]
        result["ms/token at 256 over 64"] = (median["ours_long"] / LONG_LENGTH) / (
            median["ours"] / LENGTH
        )
        results.append(result)
        print(_row(result), flush=True)
    return results


def _row(result):
    return "  ".join(
        f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in result.items()
    )


def measure_export(model, rounds):
    """SavedModel against in-process, batch 32 and 1, beam 4; first request in a fresh process."""
    import tensorflow as tf

    from tf_teaforn.data.tokenizer import Tokenizer, train_sentencepiece
    from tf_teaforn.tf_backend.export import ServingModule, write_saved_model
    from tf_teaforn.tf_backend.inference import search_function

    config = search_config(4, LENGTH)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        # The ids go around it; its size does not matter.
        train_sentencepiece(["a b c"] * 100, 265, f"{folder}/vocab.model", character_coverage=1.0)
        tokenizer = Tokenizer.load(f"{folder}/vocab.model")
        module = ServingModule(model, tokenizer, config, LENGTH, LENGTH)
        examples = {"sources": ["a"], "targets": ["b"]}
        exported = write_saved_model(module, f"{folder}/export", {}, examples, "predict")
        served = tf.saved_model.load(str(exported)).signatures["token_ids"]
        in_process = search_function(model, config)
        for batch in (1, 32):
            ids = tf.constant(sentences(batch))
            seconds = {in_process: [], served: []}
            for turn in range(rounds + 1):
                for function, values in seconds.items():
                    took, _ = timed(function, ids)
                    # The first turn warms up.
                    values += [took] if turn else []
            ratio = statistics.median(seconds[served]) / statistics.median(seconds[in_process])
            results[f"SavedModel/in-process seconds, batch {batch}, beam 4"] = ratio
        command = [sys.executable, "-c", FIRST_REQUEST, exported, json.dumps(sentences(1).tolist())]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        for name, seconds in json.loads(done.stdout).items():
            results[f"request, {name}: seconds" if name != "load" else "load: seconds"] = seconds
    for name, value in results.items():
        print(f"{name} {value:.3f}", flush=True)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", help="Python of the peers' environment")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # By the environment, so that the server's first request has as many.
    for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        os.environ[name] = str(arguments.threads)
    import keras
    import tensorflow as tf

    from tf_teaforn.models.catalog import build_model

    keras.utils.set_random_seed(0)
    model = build_model(
        "transformer_base", VOCABULARY_SIZE, norm="post", attention_bias=True, dropout=0.0
    )
    peers = None
    with tempfile.TemporaryDirectory() as folder:
        if arguments.peers:
            weights = Path(folder) / "weights.npz"
            np.savez(weights, **{weight.path: weight.numpy() for weight in model.weights})
            program = str(Path(__file__).with_name("decode_peers.py"))
            settings = [str(weights), str(NUM_HEADS), str(arguments.threads)]
            peers = Contender("decode_peers.py", [arguments.peers, program, *settings])
    searches = measure_searches(model, peers, arguments.rounds)
    if peers:
        peers.stop()
    exported = measure_export(model, arguments.rounds)
    versions = {"tensorflow": tf.__version__}
    if peers:
        versions |= peers.measured[0]["versions"]
    result = {
        "threads": arguments.threads,
        "versions": versions,
        "tokens a second": searches,
        "export": exported,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

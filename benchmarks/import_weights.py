"""`--init_from` at published sizes beside transformers: seconds, memory, parameters, logits.

    python benchmarks/import_weights.py --peers=.venv-peers/bin/python

transformers makes each model with random weights and saves it, float32, up to 2.3 GB in the folder
for temporary files; then both read it, each in a process of its own, and compute the logits of the
same ids. Seconds are those of reading, of ours with the vocabulary, without what either imports or
starts first; memory is the most that the process has had. Vocabularies are small ones of the tests.
The head of decode_peers.py has the command that makes the peers' environment.
"""

import argparse
import json
import lzma
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent


def _sizes(layers, width, inner, heads, **more):
    names = {"layers": layers, "ffn_dim": inner, "attention_heads": heads}
    parts = {f"{part}_{n}": v for part in ("encoder", "decoder") for n, v in names.items()}
    return {"d_model": width, **parts, **more}


# Name -> (kind, what its published configuration sets).
MODELS = {
    "opus-mt-en-de": (
        "marian",
        _sizes(6, 512, 2048, 8, vocab_size=58101, pad_token_id=58100, eos_token_id=0)
        | {"decoder_start_token_id": 58100, "max_position_embeddings": 512}
        | {"activation_function": "swish", "scale_embedding": True},
    ),
    "t5-base": (
        "t5",
        {"vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 3072}
        | {"num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0},
    ),
    "bart-large": ("bart", _sizes(12, 1024, 4096, 16, vocab_size=50265)),
    "pegasus-large": (
        "pegasus",
        _sizes(16, 1024, 4096, 16, vocab_size=96103)
        | {"activation_function": "relu", "scale_embedding": True},
    ),
}


def make(folder, name):
    """Saves a model of transformers; the number of its parameters."""
    import transformers

    kind, settings = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    model.save_pretrained(folder)
    _add_vocabulary(folder, kind, settings["vocab_size"])
    return {"parameters": model.num_parameters()}


def _add_vocabulary(folder, kind, size):
    for path in (ROOT / "tests" / "testdata" / kind).glob("*"):
        if path.suffix == ".xz":
            (folder / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
        elif path.suffix in (".spm", ".txt") or path.name == "vocab.json":
            shutil.copy(path, folder)
    if kind == "marian":
        path = folder / "vocab.json"
        ids = json.loads(path.read_text())
        ids |= {f"unused {i}": i for i in range(ids["<pad>"], size - 1)}
        path.write_text(json.dumps(ids | {"<pad>": size - 1}))


def ours(folder, size):
    """Reads a folder by the importer and keeps logits, with the ids, for `theirs`."""
    sys.path.insert(0, str(ROOT))
    from keras import ops

    from tf_teaforn.pretrained.importers import open_folder

    # TensorFlow starts at its first operation.
    ops.zeros(())
    start = time.perf_counter()
    pretrained = open_folder(folder)
    seq2seq = pretrained.build(dropout=0.0)
    seconds = time.perf_counter() - start
    order = getattr(pretrained.tokenizer, "order", np.arange(int(size)))
    source, target = (np.random.default_rng(0).integers(3, len(order), (2, 1, 16))).astype("int32")
    target[:, 0] = seq2seq.start_id
    logits = seq2seq({"encoder_token_ids": source, "decoder_token_ids": target})
    there = np.zeros((1, 16, len(order)), "float32")
    there[..., order] = ops.convert_to_numpy(logits)
    np.savez(folder / "ours.npz", source=order[source], target=order[target], logits=there)
    parameters = sum(int(np.prod(w.shape)) for w in seq2seq.weights if w.dtype != "uint32")
    return {"seconds": seconds, "parameters": parameters}


def theirs(folder, _):
    """Reads a folder by transformers; how far its logits are from ours."""
    import torch
    import transformers

    # transformers imports a class when it is first asked for.
    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    start = time.perf_counter()
    model = model_class.from_pretrained(folder).eval()
    seconds = time.perf_counter() - start
    kept = np.load(folder / "ours.npz")
    ids = {
        "input_ids": torch.tensor(kept["source"], dtype=torch.long),
        "decoder_input_ids": torch.tensor(kept["target"], dtype=torch.long),
    }
    with torch.no_grad():
        logits = model(**ids).logits.numpy()
    difference = np.abs(logits - kept["logits"]).max() / np.abs(logits).max()
    return {"seconds": seconds, "difference": float(difference)}


def in_process(python, role, folder, argument):
    """What `role`, a function above, returns in a process of its own, and its peak memory."""
    done = subprocess.run(
        [python, __file__, role, str(folder), str(argument)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main():
    """Prints the table, then the same as JSON."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.contender import print_table

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", required=True, help="Python with torch and transformers")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    rows = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            made = in_process(options.peers, "make", folder, name)
            size = MODELS[name][1]["vocab_size"]
            us = in_process(sys.executable, "ours", folder, size)
            them = in_process(options.peers, "theirs", folder, size)
        rows.append(
            {
                "model": name,
                "parameters": f"{us['parameters']:,}",
                "theirs": f"{made['parameters']:,}",
                "s": us["seconds"],
                "s, theirs": them["seconds"],
                "GB": us["gigabytes"],
                "GB, theirs": them["gigabytes"],
                "logits, relative": them["difference"],
            }
        )
        print(rows[-1], file=sys.stderr)
    print_table(rows)
    print(json.dumps(rows))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ("make", "ours", "theirs"):
        found = globals()[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        print(json.dumps({**found, "gigabytes": peak}))
    else:
        main()

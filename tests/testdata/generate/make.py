"""Writes weights.npz and outputs.json: what Hugging Face's `generate` finds on a tiny model.

    .venv-peers/bin/python -m tests.testdata.generate.make

The environment is the one of benchmarks/decode_peers.py.
"""

import json
from pathlib import Path

import numpy as np
import torch

from benchmarks.decode_peers import generate, marian_model, marian_name

FOLDER = Path(__file__).parent
SIZES = {"num_layers": 1, "hidden_dim": 16, "intermediate_dim": 24, "num_heads": 2}
VOCABULARY_SIZE = 30
MAX_LENGTH = 40
STEPS = 250


def weights(random):
    """{our path: float32 array} of a post-norm Transformer with biases."""
    width, inner = SIZES["hidden_dim"], SIZES["intermediate_dim"]

    def dense(path, rows, columns):
        yield f"{path}/kernel", random.normal(size=(rows, columns)) * 1.0 / np.sqrt(rows)
        yield f"{path}/bias", random.normal(size=columns) * 0.1

    def norm(path):
        yield f"{path}_residual/layer_norm/gamma", 1 + 0.2 * random.normal(size=width)
        yield f"{path}_residual/layer_norm/beta", 0.2 * random.normal(size=width)

    table = random.normal(size=(VOCABULARY_SIZE, width)) / np.sqrt(width)
    table[0] = 0.0
    yield "seq2seq/embedding/embeddings", table
    for side, attentions in (
        ("encoder", ("self_attention",)),
        ("decoder", ("self_attention", "cross_attention")),
    ):
        for attention in attentions:
            path = f"seq2seq/{side}/layer_0_{attention}"
            for part in ("query", "key", "value", "output"):
                yield from dense(f"{path}/{part}", width, width)
            yield from norm(path)
        path = f"seq2seq/{side}/layer_0_feed_forward"
        yield from dense(f"{path}/inner", width, inner)
        yield from dense(f"{path}/outer", inner, width)
        yield from norm(path)


def sentences(random, count):
    """Random ids of random lengths, and the same backwards: (sources, targets), padded."""
    lengths = random.integers(1, 9, size=count)
    rows = [random.integers(2, VOCABULARY_SIZE, size=n).tolist() for n in lengths]

    def padded(rows):
        return torch.tensor([row + [1] + [0] * (8 - len(row)) for row in rows])

    return padded(rows), padded([row[::-1] for row in rows])


def train(arrays, random):
    """Learns to turn sentences around, not too well, so that beams have something to choose."""
    model = marian_model(arrays, SIZES["num_heads"]).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(STEPS):
        sources, targets = sentences(random, 64)
        labels = targets.masked_fill(targets == 0, -100)
        loss = model(input_ids=sources, attention_mask=(sources != 0).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    state = model.state_dict()
    for path in arrays:
        name, transposed = marian_name(path)
        value = state[name].numpy()
        arrays[path] = (value.T if transposed else value).astype("float16")
    # Where decoding starts.
    arrays["seq2seq/embedding/embeddings"][0] = 0.0


def main():
    random = np.random.default_rng(4)
    torch.manual_seed(0)
    arrays = {path: array.astype("float32") for path, array in weights(random)}
    train(arrays, random)
    np.savez_compressed(FOLDER / "weights.npz", **arrays)
    model = marian_model(
        {path: array.astype("float32") for path, array in arrays.items()}, SIZES["num_heads"]
    )
    model.generation_config.max_length = MAX_LENGTH + 1
    sources = sentences(random, 60)[0].tolist()
    outputs = {}
    for beam_size in (1, 4, 8):
        with torch.inference_mode():
            found = generate(model, sources, beam_size, None)[:, 1:].tolist()
        # It fills up with the end of sentence where padding is 0.
        outputs[beam_size] = [row[: row.index(1) + 1] if 1 in row else row for row in found]
        ended = sum(row[-1] == 1 for row in outputs[beam_size])
        print(f"beam {beam_size}: {ended} of {len(sources)} end")
    content = {"sources": sources, "outputs": outputs}
    (FOLDER / "outputs.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()

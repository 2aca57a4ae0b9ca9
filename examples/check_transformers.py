"""Compares an export for Hugging Face transformers with the model that it came from.

    bin/export --model_dir=MODEL_DIR --export_dir=FOLDER --format=transformers
    python examples/check_transformers.py ours MODEL_DIR logits.npz
    peers/bin/python examples/check_transformers.py theirs FOLDER logits.npz

The first command of the two runs here and keeps the logits of random sentences; the second runs
where torch and transformers are, and prints by how much theirs differ for ids from 1.
"""

import sys

import numpy as np


def ours(model_dir, output):
    """Writes source ids, decoder ids and logits of the best checkpoint."""
    import tf_teaforn

    seq2seq = tf_teaforn.load(model_dir).seq2seq
    random = np.random.default_rng(0)
    ids = random.integers(2, seq2seq.vocabulary_size, (2, 4, 9)).astype("int32")
    ids[0, 1:, 5:] = 0
    ids[1, :, 0] = seq2seq.start_id
    logits = seq2seq({"encoder_token_ids": ids[0], "decoder_token_ids": ids[1]})
    np.savez(output, ids=ids, logits=np.asarray(logits))


def theirs(folder, expected):
    """Prints the largest difference; fails above 1e-4."""
    import torch
    import transformers

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    kept = np.load(expected)
    source_ids, decoder_ids = torch.tensor(kept["ids"]).long()
    with torch.no_grad():
        logits = model(
            input_ids=source_ids, attention_mask=source_ids != 0, decoder_input_ids=decoder_ids
        ).logits.numpy()
    difference = np.abs(logits - kept["logits"])[..., 1:].max()
    print(f"{type(model).__name__}: largest difference of logits {difference:.2g}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    print(f"{type(tokenizer).__name__}: {tokenizer('This is a sentence.').input_ids}")
    if not difference < 1e-4:
        sys.exit("They differ.")


if __name__ == "__main__":
    {"ours": ours, "theirs": theirs}[sys.argv[1]](*sys.argv[2:])

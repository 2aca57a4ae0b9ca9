"""Hugging Face's and CTranslate2's search on weights of ours; runs where those two are installed.

    python3 -m venv .venv-peers
    .venv-peers/bin/pip install torch transformers ctranslate2 sentencepiece

torch's build for CPUs is enough.

A contender that decode.py starts. Arguments: weights.npz, number of heads, number of threads.
"""

import sys
import tempfile
import time
from pathlib import Path

import ctranslate2
import numpy as np
import torch
import transformers
from ctranslate2.converters.transformers import MarianMTLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contender import take_turns  # noqa: E402

# Ours -> Marian's, one layer.
_PARTS = {
    "self_attention/query": "self_attn.q_proj",
    "self_attention/key": "self_attn.k_proj",
    "self_attention/value": "self_attn.v_proj",
    "self_attention/output": "self_attn.out_proj",
    "self_attention_residual/layer_norm": "self_attn_layer_norm",
    "cross_attention/query": "encoder_attn.q_proj",
    "cross_attention/key": "encoder_attn.k_proj",
    "cross_attention/value": "encoder_attn.v_proj",
    "cross_attention/output": "encoder_attn.out_proj",
    "cross_attention_residual/layer_norm": "encoder_attn_layer_norm",
    "feed_forward/inner": "fc1",
    "feed_forward/outer": "fc2",
    "feed_forward_residual/layer_norm": "final_layer_norm",
}
_KINDS = {"kernel": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}


def marian_name(path):
    """(name in `MarianMTModel.state_dict`, whether it is transposed there) of a weight of ours."""
    _, side, *rest = path.split("/")
    if side == "embedding":
        return "model.shared.weight", False
    _, layer, part = rest[0].split("_", 2)
    name = _PARTS["/".join([part, *rest[1:-1]])]
    kind = rest[-1]
    return f"model.{side}.layers.{layer}.{name}.{_KINDS[kind]}", kind == "kernel"


def marian_model(weights, num_heads):
    """`MarianMTModel` with the weights, {path: array}, of a post-norm Transformer with biases."""
    state = {}
    for path, value in weights.items():
        name, transposed = marian_name(path)
        state[name] = torch.tensor(value.T if transposed else value)
    table = state.pop("model.shared.weight")
    size, width = table.shape
    depth = 1 + max(int(name.split(".")[3]) for name in state)
    shared = {
        f"{part}_{setting}": value
        for part in ("encoder", "decoder")
        for setting, value in (
            ("layers", depth),
            ("attention_heads", num_heads),
            ("ffn_dim", len(state["model.encoder.layers.0.fc1.bias"])),
        )
    }
    config = transformers.MarianConfig(
        vocab_size=size,
        d_model=width,
        **shared,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
    )
    model = transformers.MarianMTModel(config).eval()
    for name in ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens"):
        state[f"{name}.weight"] = table
    state["lm_head.weight"] = table
    missing, unexpected = model.load_state_dict(state, strict=False)
    regenerated = ("embed_positions.weight", "final_logits_bias")
    assert not unexpected and all(name.endswith(regenerated) for name in missing), missing
    return model


def generate(model, source_ids, beam_size, length, n_best=1):
    """Hugging Face's search, no length penalty; `length` tokens each if `length` is given."""
    ids = torch.tensor(source_ids)
    settings = {"min_new_tokens": length, "max_new_tokens": length} if length else {}
    return model.generate(
        input_ids=ids,
        attention_mask=(ids != 0).long(),
        num_beams=beam_size,
        num_return_sequences=n_best,
        do_sample=False,
        length_penalty=0.0,
        suppress_tokens=[0],
        **settings,
    )


class _Vocabulary:
    """What the converter asks of a tokenizer."""

    eos_token, unk_token, bos_token = "1", "2", "1"

    def __init__(self, size):
        self.size = size

    def get_vocab(self):
        return {str(i): i for i in range(self.size)}


class _Loader(MarianMTLoader):
    def _remove_pad_weights(self, spec):
        """Padding is the last id in Marian's own vocabularies, the first in this one."""


def ctranslate2_translator(model, threads):
    """The same weights in CTranslate2, float32."""
    spec = _Loader()(model, _Vocabulary(model.config.vocab_size))
    spec.validate()
    spec.optimize()
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        return ctranslate2.Translator(
            folder, device="cpu", compute_type="float32", inter_threads=1, intra_threads=threads
        )


def main():
    path, num_heads, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    weights = np.load(path)
    model = marian_model({name: weights[name] for name in weights.files}, num_heads)
    translator = ctranslate2_translator(model, threads)

    def translate(source_ids, beam_size, length):
        found = translator.translate_batch(
            [[str(i) for i in row if i] for row in source_ids],
            beam_size=beam_size,
            length_penalty=0.0,
            min_decoding_length=length,
            max_decoding_length=length,
            suppress_sequences=[["0"]],
            max_batch_size=0,
        )
        return [[int(i) for i in result.hypotheses[0]] for result in found]

    run = {
        "transformers": lambda **args: generate(model, **args)[:, 1:].tolist(),
        "ctranslate2": translate,
    }
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "ctranslate2": ctranslate2.__version__,
    }

    def measure(peer, **request):
        start = time.perf_counter()
        with torch.inference_mode():
            tokens = run[peer](**request)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": tokens, "versions": versions}

    take_turns(measure)


if __name__ == "__main__":
    main()

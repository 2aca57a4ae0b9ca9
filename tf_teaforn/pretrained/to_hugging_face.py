"""A model as a folder of Hugging Face `transformers`: its Marian or PEGASUS class."""

import json
import os
import secrets

import numpy as np
import safetensors.numpy
from etils import epath
from keras import ops

from tf_teaforn.data import marian_tokenizer, pegasus_tokenizer, tokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.models.position import position_signal
from tf_teaforn.models.transformer import TransformerDecoder, TransformerEncoder
from tf_teaforn.paths import flush_folder, is_remote, move_folder
from tf_teaforn.pretrained.transformer import hugging_face_source, layer_variables

# Their names of our activations.
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "silu": "swish", "swish": "swish"}
# Theirs is fixed; in place of a smaller one it changes a norm's output by up to 5e-6 / variance of
# itself.
_NORM_EPSILON = 1e-5
_PADDING = "<pad>"


def counterpart(seq2seq):
    """Their class for a `Seq2Seq`: "marian" for post-norm, "pegasus" for pre-norm.

    Raises:
        UserError: there is none; names what is in the way.
    """

    def refuse(what):
        raise UserError(f"--format=transformers: {what} has no counterpart there.")

    if not seq2seq.embedding.tie_weights:
        refuse("an embedding with softmax weights of their own")
    for part, kind in (("encoder", TransformerEncoder), ("decoder", TransformerDecoder)):
        layer = getattr(seq2seq, part)
        if type(layer) is not kind:
            refuse(f"a {type(layer).__name__}")
        settings = layer.settings
        if settings["activation"] not in _ACTIVATIONS:
            refuse(f"activation {settings['activation']}")
        if settings["norm_epsilon"] > _NORM_EPSILON:
            refuse(f"norm_epsilon {settings['norm_epsilon']}")
        if settings["norm"] == "post" and settings["position_signal"] != "half_split":
            refuse(f"norm post with position_signal {settings['position_signal']}")
    encoder, decoder = (part.settings for part in (seq2seq.encoder, seq2seq.decoder))
    if encoder["norm"] != decoder["norm"]:
        refuse("an encoder and a decoder of different norms")
    # Theirs is one setting for both.
    if _ACTIVATIONS[encoder["activation"]] != _ACTIVATIONS[decoder["activation"]]:
        refuse("an encoder and a decoder of different activations")
    return "marian" if decoder["norm"] == "post" else "pegasus"


def write_folder(seq2seq, tokens, folder, *, max_length, generation_length=None, beam_size=1):
    """Writes config.json, generation_config.json, model.safetensors and tokenizer files.

    Logits are the same for ids from 1; id 0, padding, is never produced. Beam search there
    divides by length^penalty and not by ((5 + length) / 6)^alpha. Rates of dropout, one set for
    both parts there, are the decoder's.

    Args:
        seq2seq: `Seq2Seq`.
        tokens: its `SubwordTokenizer`.
        folder: does not exist, or is empty and not the current one; written beside and renamed.
        max_length: tokens that positions are needed for.
        generation_length: most tokens that `generate` yields, the start token among them; None: as
            many as there are positions.
        beam_size: for `generate`.

    Raises:
        UserError: there is no counterpart, or the folder cannot be replaced.
    """
    kind = counterpart(seq2seq)
    folder = epath.Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--export_dir={folder} is not empty: write another.")
    if os.path.abspath(folder) == os.getcwd():
        # To replace it would leave the caller in a folder that is gone.
        raise UserError(f"--export_dir={folder} is the current folder: name one inside it.")
    files = _tokenizer_files(tokens, max_length)
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": seq2seq.start_id}
    config = _config(seq2seq, kind, max_length) | ids
    generation = {**ids, "bad_words_ids": [[0]], "num_beams": beam_size}
    generation["max_length"] = generation_length or max_length
    files |= {"config.json": _json(config), "generation_config.json": _json(generation)}
    files["model.safetensors"] = safetensors.numpy.save(
        _tensors(seq2seq, kind, max_length), metadata={"format": "pt"}
    )
    aside = folder.with_name(f"{folder.name}.{secrets.token_hex(8)}.partial")
    try:
        aside.mkdir(parents=True)
        for name, content in files.items():
            (aside / name).write_bytes(content)
        flush_folder(aside)
        if folder.exists() and not is_remote(folder):
            os.rmdir(folder)
        move_folder(aside, folder, "model.safetensors")
    finally:
        if aside.exists():
            aside.rmtree()


def _json(content):
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _config(seq2seq, kind, max_length):
    config = {
        "model_type": kind,
        "architectures": [
            "MarianMTModel" if kind == "marian" else "PegasusForConditionalGeneration"
        ],
        "is_encoder_decoder": True,
        "vocab_size": seq2seq.vocabulary_size,
        "d_model": seq2seq.decoder.hidden_dim,
        "max_position_embeddings": max_length,
        "scale_embedding": seq2seq.embedding.scaled,
        "static_position_embeddings": True,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "forced_eos_token_id": None,
    }
    if kind == "marian":
        config |= {"decoder_vocab_size": seq2seq.vocabulary_size}
        config |= {"share_encoder_decoder_embeddings": True}
    for part in ("encoder", "decoder"):
        settings = getattr(seq2seq, part).settings
        config |= {
            f"{part}_layers": settings["num_layers"],
            f"{part}_ffn_dim": settings["intermediate_dim"],
            f"{part}_attention_heads": settings["num_heads"],
            "activation_function": _ACTIVATIONS[settings["activation"]],
            **{name: settings[name] for name in _RATES},
        }
    return config


_RATES = ("dropout", "attention_dropout", "activation_dropout")


def _tensors(seq2seq, kind, max_length):
    tensors = {}
    variables = layer_variables(seq2seq)
    for (part, number, sublayer, piece, parameter), variable in variables.items():
        source = hugging_face_source(part, number, sublayer, piece, parameter)
        value = ops.convert_to_numpy(variable).astype(np.float32)
        tensors[source.name] = np.ascontiguousarray(value.T if source.transpose else value)
        if parameter == "kernel" and (part, number, sublayer, piece, "bias") not in variables:
            bias = hugging_face_source(part, number, sublayer, piece, "bias")
            tensors[bias.name] = np.zeros(value.shape[1], np.float32)
    table = ops.convert_to_numpy(seq2seq.embedding.embeddings).astype(np.float32)
    if seq2seq.embedding.zero_row:
        # What we start from; they start from the row itself.
        table = np.concatenate([np.zeros_like(table[:1]), table[1:]])
    tensors["model.shared.weight"] = table
    bias = seq2seq.embedding.bias()
    bias = np.zeros(len(table)) if bias is None else ops.convert_to_numpy(bias)
    tensors["final_logits_bias"] = bias.astype(np.float32)[None]
    if kind == "pegasus":
        for part in ("encoder", "decoder"):
            stack = getattr(seq2seq, part)
            layout = stack.settings["position_signal"]
            signal = position_signal(ops.arange(max_length), stack.hidden_dim, layout)
            name = f"model.{part}.embed_positions.weight"
            tensors[name] = np.ascontiguousarray(ops.convert_to_numpy(signal))
    return tensors


def _tokenizer_files(tokens, max_length):
    """Files by name; none for a vocabulary without counterpart."""
    special = {"pad_token": _PADDING, "eos_token": "</s>", "unk_token": "<unk>"}
    special["model_max_length"] = max_length
    if isinstance(tokens, pegasus_tokenizer.PegasusTokenizer):
        settings = {"tokenizer_class": "PegasusTokenizer", "offset": tokens.settings["shift"]}
        return {**tokens.files, "tokenizer_config.json": _json(settings | special)}
    if isinstance(tokens, marian_tokenizer.MarianTokenizer):
        theirs = json.loads(tokens.files[marian_tokenizer.VOCABULARY_FILE])
        place = {int(i): ours for ours, i in enumerate(tokens.order)}
        vocabulary = {piece: place[i] for piece, i in theirs.items()}
        files = dict(tokens.files)
    elif isinstance(tokens, tokenizer.Tokenizer):
        processor = tokenizer.load_sentencepiece(tokens.model_bytes)
        vocabulary = {processor.id_to_piece(i): i for i in range(tokens.vocabulary_size)}
        files = {
            marian_tokenizer.SOURCE_FILE: tokens.model_bytes,
            marian_tokenizer.TARGET_FILE: tokens.model_bytes,
        }
    else:
        return {}
    settings = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": False}
    return {
        **files,
        marian_tokenizer.VOCABULARY_FILE: _json(vocabulary),
        "tokenizer_config.json": _json(settings | special),
    }

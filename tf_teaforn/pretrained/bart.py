"""BART as Hugging Face keeps it: config.json, model.safetensors, vocab.json, merges.txt.

The last two may be missing where tokenizer.json, which has both in it, is not.
"""

import dataclasses
import math

from tf_teaforn.data.byte_pair_tokenizer import (
    MERGES_FILE,
    VOCABULARY_FILE,
    BytePairTokenizer,
    vocabulary_files,
)
from tf_teaforn.errors import UserError
from tf_teaforn.models.hub import build_bart
from tf_teaforn.pretrained.bart_layout import BartLayout, assign_all, check_ids
from tf_teaforn.pretrained.importer import read_files, refuse_added_tokens
from tf_teaforn.pretrained.tensors import Source, read_settings, settings_if_any
from tf_teaforn.pretrained.transformer import hugging_face_source

# The table of positions has two rows in front that no position has.
_POSITION_OFFSET = 2
_TOKENIZER = "tokenizer.json"


class Bart(BartLayout):
    """The layers of KerasHub's backbone."""

    model = "bart"
    types = ("bart",)

    def __init__(self, folder):
        super().__init__(folder)
        positions = self._settings.get("max_position_embeddings", 1024)
        for part, sizes in self._parts.items():
            if sizes["activation"] != "gelu":
                raise UserError(f"{self._origin}: activation_function must be 'gelu'.")
            kept = {name: sizes[name] for name in _SIZES}
            self._parts[part] = {**kept, "max_positions": positions}
        if settings_if_any(folder, "tokenizer_config.json").get("add_prefix_space"):
            raise UserError(f"{folder}: a tokenizer with add_prefix_space is not supported.")
        self.tokenizer = BytePairTokenizer(_vocabulary(folder), self._settings.get("vocab_size"))
        refuse_added_tokens(folder, self.tokenizer.end)
        self.order = self.tokenizer.order
        pad, eos = self.order[:2]
        expected = {"pad_token_id": pad, "eos_token_id": eos}
        check_ids(self._settings, self._origin, VOCABULARY_FILE, expected)
        self._start = self._settings.get("decoder_start_token_id", 2)
        if self._start not in range(len(self.order)):
            raise UserError(
                f"{self._origin}: decoder_start_token_id must be an id from 0 to "
                f"{len(self.order) - 1}, not {self._start}."
            )

    def _random_model(self, tensors, *sizes, **settings):
        return build_bart(*sizes, **settings, start_id=int((self.order == self._start).argmax()))

    def _assign(self, seq2seq, tensors):
        variables, sources = _layers(seq2seq)
        assign_all(seq2seq, variables, sources, tensors, self.order, learned_positions=True)


def _vocabulary(folder):
    """Files for `BytePairTokenizer`."""
    names = (VOCABULARY_FILE, MERGES_FILE)
    if all((folder / name).exists() for name in names) or not (folder / _TOKENIZER).exists():
        return read_files(folder, *names)
    try:
        model = read_settings(folder, _TOKENIZER)["model"]
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        return vocabulary_files(model["vocab"], merges)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder / _TOKENIZER} has no vocabulary of BART ({error!r}): copy "
            f"{VOCABULARY_FILE} and {MERGES_FILE} from the model that this one was tuned from."
        ) from None


_SIZES = ("num_layers", "hidden_dim", "intermediate_dim", "num_heads", "dropout")
_NORM = {"gamma": "weight", "beta": "bias"}


def _layers(seq2seq):
    """{path: variable} and {path: `Source`} of encoder and decoder."""
    variables, sources = {}, {}

    def add(layer, source):
        for variable in layer.weights:
            variables[variable.path] = variable
            sources[variable.path] = source(variable)

    for part in ("encoder", "decoder"):
        stack = getattr(seq2seq, part)
        table = Source(f"model.{part}.embed_positions.weight", skip=_POSITION_OFFSET)
        add(stack.position_embedding, lambda _, table=table: table)
        norm = f"model.{part}.layernorm_embedding"
        add(stack.embedding_norm, lambda v, norm=norm: Source(f"{norm}.{_NORM[v.name]}"))
        for number, sublayer, piece, layer in stack.pieces():

            def source(variable, key=(part, number, sublayer, piece)):
                found = hugging_face_source(*key, variable.name)
                return dataclasses.replace(found, shape=_without_heads(variable, key[-1]))

            add(layer, source)
    return variables, sources


def _without_heads(variable, piece):
    """Shape of a weight, with one axis for all heads and what is in them."""
    shape = tuple(variable.shape)
    if len(shape) == 3:
        inputs = 2 if piece == "output" else 1
        return math.prod(shape[:inputs]), math.prod(shape[inputs:])
    if len(shape) == 2 and variable.name == "bias":
        return (math.prod(shape),)
    return shape

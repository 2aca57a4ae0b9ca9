"""What models of BART's layout have in common at Hugging Face: PEGASUS, Marian, BART."""

import numpy as np
from keras import ops

from tf_teaforn.errors import UserError
from tf_teaforn.models.architecture import with_dropout
from tf_teaforn.models.position import position_signal
from tf_teaforn.pretrained.importer import HuggingFaceFolder
from tf_teaforn.pretrained.tensors import Source, assign, check_sizes, open_safetensors, with_tied
from tf_teaforn.pretrained.transformer import (
    build_transformer,
    hugging_face_sizes,
    hugging_face_source,
    layer_variables,
)

_BASE = "model."
_EMBEDDING = f"{_BASE}shared.weight"
_BIAS = "final_logits_bias"
# Other names of the one table, which files have besides or instead.
_COPIES = (
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
)
# Of old checkpoints of fairseq, without effect.
_MARKS = ("model.encoder.version", "model.decoder.version")
_POSITIONS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")


class BartLayout(HuggingFaceFolder):
    """A model of our own layers; BART, which has others, says how to make and fill them.

    Attributes:
        order: int [V], foreign ids in the order of ours, or None for the same.
        layers: settings of encoder and decoder that all models of the family share.
    """

    order = None
    layers = {}

    def __init__(self, folder):
        super().__init__(folder)
        self._parts = {
            part: {**hugging_face_sizes(self._settings, part, self._origin), **self.layers}
            for part in ("encoder", "decoder")
        }

    def build(self, dtype=None, dropout=None):
        tensors = open_safetensors(self._folder)
        if not any(name.startswith(_BASE) for name in tensors.shapes):
            # Saved without the head of a task, as BartModel is.
            tensors = tensors.under(_BASE)
        tensors = with_tied(tensors, _EMBEDDING, _COPIES)
        check_sizes(tensors, self.tokenizer.vocabulary_size, *self._parts.values())
        seq2seq = self._random_model(
            tensors,
            self.tokenizer.vocabulary_size,
            *(with_dropout(part, dropout) for part in self._parts.values()),
            dtype=dtype,
            scaled=self._settings.get("scale_embedding", False),
            logits_bias=_has_logits_bias(tensors),
        )
        self._assign(seq2seq, tensors)
        return seq2seq

    def _random_model(self, tensors, *sizes, **settings):
        """The `Seq2Seq` of these sizes and settings, before it gets its weights."""
        pad = 0 if self.order is None else self.order[0]
        # The tied softmax of transformers trains the row of padding, which decoding starts from; in
        # the published models it is zero.
        return build_transformer(*sizes, **settings, zero_row=_padding_is_zero(tensors, pad))

    def _assign(self, seq2seq, tensors):
        variables = layer_variables(seq2seq)
        sources = {key: hugging_face_source(*key) for key in variables}
        assign_all(seq2seq, variables, sources, tensors, self.order)


def check_ids(settings, origin, vocabulary, expected):
    """Compares special ids and the like of config.json, where it has them, with the vocabulary's.

    Args:
        settings: of config.json.
        origin, vocabulary: names of the two for errors.
        expected: {name: value}.

    Raises:
        UserError: some differ; names them.
    """
    wrong = [
        f"{name} is {settings[name]}, not {value}"
        for name, value in expected.items()
        if settings.get(name, value) != value
    ]
    if wrong:
        raise UserError(f"{origin} does not fit {vocabulary}: {', '.join(wrong)}.")


def _has_logits_bias(tensors):
    """Whether a constant other than 0 is added to the logits."""
    return _BIAS in tensors.shapes and bool(np.any(tensors.read(_BIAS)))


def _padding_is_zero(tensors, pad):
    if _EMBEDDING not in tensors.shapes:
        return True
    # A table that is too short is found when it is assigned.
    return not np.any(tensors.read(_EMBEDDING)[pad : pad + 1])


def assign_all(seq2seq, variables, sources, tensors, order=None, learned_positions=False):
    """Sets all weights of a model.

    Args:
        seq2seq: the `Seq2Seq`.
        variables, sources: {key: Keras variable} and {key: `Source`} of encoder and decoder.
        tensors: `TensorFile`.
        order: int [V], foreign ids in the order of ours, or None for the same.
        learned_positions: whether `sources` has tables of positions; otherwise those of the file
            must be the half-split sinusoids that our layers compute.

    Raises:
        UserError: names what is missing, unknown, or different from what our layers compute.
    """
    variables, sources = dict(variables), dict(sources)
    for weight in seq2seq.embedding.weights:
        variables[weight.name] = weight
        sources[weight.name] = (
            Source(_EMBEDDING, rows=order)
            if weight.name == "embeddings"
            else Source(_BIAS, rows=order, squeeze=True)
        )
    ignored = (*_COPIES, *_MARKS, _BIAS)
    if not learned_positions:
        _check_sinusoids(tensors, seq2seq.embedding.embeddings.shape[1])
        ignored += _POSITIONS
    assign(variables, sources, tensors, ignored)


def _check_sinusoids(tensors, width):
    for name in set(_POSITIONS) & set(tensors.shapes):
        shape = tensors.shapes[name]
        if len(shape) != 2 or shape[1] != width:
            raise UserError(f"{tensors.origin}: {name} has the shape {shape}, not [_, {width}].")
        table = tensors.read(name)
        expected = position_signal(np.arange(len(table)), table.shape[-1], "half_split")
        difference = np.abs(table - ops.convert_to_numpy(expected)).max()
        # Tables in half precision.
        if difference > 5e-3:
            raise UserError(
                f"{tensors.origin}: {name} does not hold the sinusoids that our layers compute; it "
                f"differs by {difference:.3g}."
            )

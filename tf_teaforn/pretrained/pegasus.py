"""PEGASUS as Hugging Face keeps it: config.json, model.safetensors, spiece.model."""

import numpy as np
from keras import ops

from tf_teaforn.data.pegasus_tokenizer import SENTENCEPIECE_FILE, SHIFT, PegasusTokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.models.architecture import with_dropout
from tf_teaforn.models.position import position_signal
from tf_teaforn.pretrained.importer import Pretrained
from tf_teaforn.pretrained.tensors import (
    Source,
    assign,
    model_type,
    open_safetensors,
    read_settings,
)
from tf_teaforn.pretrained.transformer import (
    build_transformer,
    hugging_face_sizes,
    hugging_face_source,
    layer_variables,
)

_EMBEDDING = "model.shared.weight"
_BIAS = "final_logits_bias"
# Other names of the one table, which older files have besides.
_COPIES = (
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
)
_POSITIONS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")


class Pegasus(Pretrained):
    """Pre-norm, attention with biases, half-split sinusoids (Google's have another divisor)."""

    model = "pegasus"

    @classmethod
    def recognizes(cls, folder):
        return model_type(folder) == "pegasus"

    def __init__(self, folder):
        self._folder = folder
        self._settings = settings = read_settings(folder)
        origin = folder / "config.json"
        ids = {name: settings.get(name, i) for name, i in _IDS.items()}
        if ids != _IDS:
            raise UserError(f"{origin}: PEGASUS has {_IDS}, this has {ids}.")
        self._parts = {
            part: {
                **hugging_face_sizes(settings, part, origin),
                "position_signal": "half_split",
            }
            for part in ("encoder", "decoder")
        }
        path = folder / SENTENCEPIECE_FILE
        if not path.exists():
            raise UserError(f"{path} is missing: it is the vocabulary.")
        shift = SHIFT
        if (folder / "tokenizer_config.json").exists():
            shift = read_settings(folder, "tokenizer_config.json").get("offset", SHIFT)
        size = settings.get("vocab_size")
        if not isinstance(size, int):
            raise UserError(f"{origin} has no vocab_size.")
        try:
            self.tokenizer = PegasusTokenizer({SENTENCEPIECE_FILE: path.read_bytes()}, shift, size)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    def build(self, dtype=None, dropout=None):
        tensors = open_safetensors(self._folder)
        bias = tensors.read(_BIAS) if _BIAS in tensors.shapes else np.zeros(1)
        encoder, decoder = (with_dropout(part, dropout) for part in self._parts.values())
        seq2seq = build_transformer(
            self.tokenizer.vocabulary_size,
            encoder,
            decoder,
            dtype=dtype,
            scaled=self._settings.get("scale_embedding", False),
            logits_bias=bool(np.any(bias)),
        )
        variables = layer_variables(seq2seq)
        sources = {key: hugging_face_source(*key) for key in variables}
        for weight in seq2seq.embedding.weights:
            variables[weight.name] = weight
            sources[weight.name] = (
                Source(_EMBEDDING) if weight.name == "embeddings" else Source(_BIAS, squeeze=True)
            )
        self._check_positions(tensors)
        _check_copies(tensors)
        assign(variables, sources, tensors, ignored=(*_COPIES, *_POSITIONS, _BIAS))
        if np.any(seq2seq.embedding.embeddings[0]):
            raise UserError(
                f"{self._folder}: the row of padding in {_EMBEDDING} is not zero, so decoding does "
                "not start from the zero vector, as PEGASUS does."
            )
        return seq2seq

    def _check_positions(self, tensors):
        """The sinusoids, if they are in the file, are those that our layers compute."""
        for name in set(_POSITIONS) & set(tensors.shapes):
            table = tensors.read(name)
            expected = position_signal(np.arange(len(table)), table.shape[-1], "half_split")
            difference = np.abs(table - ops.convert_to_numpy(expected)).max()
            # Tables in half precision.
            if difference > 5e-3:
                raise UserError(
                    f"{self._folder}: {name} does not hold the sinusoids of PEGASUS; it differs by "
                    f"{difference:.3g}."
                )


_IDS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


def _check_copies(tensors):
    for name in set(_COPIES) & set(tensors.shapes):
        if _EMBEDDING in tensors.shapes and not np.array_equal(
            tensors.read(name), tensors.read(_EMBEDDING)
        ):
            raise UserError(
                f"{tensors.origin}: {name} differs from {_EMBEDDING}: they must be one."
            )

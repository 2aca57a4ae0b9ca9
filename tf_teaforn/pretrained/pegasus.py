"""PEGASUS as Hugging Face keeps it: config.json, model.safetensors, spiece.model."""

from tf_teaforn.data.pegasus_tokenizer import SENTENCEPIECE_FILE, SHIFT, PegasusTokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.models.architecture import with_dropout
from tf_teaforn.pretrained.bart_layout import assign_all, has_logits_bias, padding_is_zero
from tf_teaforn.pretrained.importer import Pretrained
from tf_teaforn.pretrained.tensors import model_type, open_safetensors, read_settings
from tf_teaforn.pretrained.transformer import (
    build_transformer,
    hugging_face_sizes,
    hugging_face_source,
    layer_variables,
)

_IDS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


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
        encoder, decoder = (with_dropout(part, dropout) for part in self._parts.values())
        seq2seq = build_transformer(
            self.tokenizer.vocabulary_size,
            encoder,
            decoder,
            dtype=dtype,
            scaled=self._settings.get("scale_embedding", False),
            logits_bias=has_logits_bias(tensors),
            # The tied softmax of transformers trains the row of padding, which decoding starts
            # from; in the published models it is zero.
            zero_row=padding_is_zero(tensors, 0),
        )
        variables = layer_variables(seq2seq)
        sources = {key: hugging_face_source(*key) for key in variables}
        assign_all(seq2seq, variables, sources, tensors)
        return seq2seq

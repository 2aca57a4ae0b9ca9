"""Marian (opus-mt) as Hugging Face keeps it: config.json, model.safetensors, vocabularies."""

from tf_teaforn.data.marian_tokenizer import (
    SOURCE_FILE,
    TARGET_FILE,
    VOCABULARY_FILE,
    MarianTokenizer,
)
from tf_teaforn.errors import UserError
from tf_teaforn.models.architecture import with_dropout
from tf_teaforn.pretrained.bart_layout import assign_all, has_logits_bias, padding_is_zero
from tf_teaforn.pretrained.importer import Pretrained, read_files
from tf_teaforn.pretrained.tensors import model_type, open_safetensors, read_settings
from tf_teaforn.pretrained.transformer import (
    build_transformer,
    hugging_face_sizes,
    hugging_face_source,
    layer_variables,
)


class Marian(Pretrained):
    """Post-norm, attention with biases, half-split sinusoids, a constant bias of the logits."""

    model = "marian"

    @classmethod
    def recognizes(cls, folder):
        return model_type(folder) == "marian"

    def __init__(self, folder):
        self._folder = folder
        self._settings = settings = read_settings(folder)
        origin = folder / "config.json"
        self._parts = {
            part: {
                **hugging_face_sizes(settings, part, origin),
                "norm": "post",
                "position_signal": "half_split",
            }
            for part in ("encoder", "decoder")
        }
        for name, value in (
            ("share_encoder_decoder_embeddings", True),
            ("normalize_before", False),
            ("normalize_embedding", False),
            ("add_final_layer_norm", False),
        ):
            if settings.get(name, value) != value:
                raise UserError(f"{origin}: {name} {settings[name]} is not supported.")
        self.tokenizer = MarianTokenizer(
            read_files(folder, SOURCE_FILE, TARGET_FILE, VOCABULARY_FILE)
        )
        pad, eos = self.tokenizer.order[:2]
        expected = {
            "vocab_size": len(self.tokenizer.order),
            "pad_token_id": pad,
            "eos_token_id": eos,
            "decoder_start_token_id": pad,
        }
        wrong = [name for name, value in expected.items() if settings.get(name, value) != value]
        if wrong:
            raise UserError(f"{origin} does not fit {VOCABULARY_FILE}: {', '.join(wrong)}.")

    def build(self, dtype=None, dropout=None):
        tensors = open_safetensors(self._folder)
        order = self.tokenizer.order
        encoder, decoder = (with_dropout(part, dropout) for part in self._parts.values())
        seq2seq = build_transformer(
            self.tokenizer.vocabulary_size,
            encoder,
            decoder,
            dtype=dtype,
            scaled=self._settings.get("scale_embedding", False),
            logits_bias=has_logits_bias(tensors),
            # Fine-tuning by transformers moves the vector that decoding starts from.
            zero_row=padding_is_zero(tensors, order[0]),
        )
        variables = layer_variables(seq2seq)
        sources = {key: hugging_face_source(*key) for key in variables}
        assign_all(seq2seq, variables, sources, tensors, order)
        return seq2seq

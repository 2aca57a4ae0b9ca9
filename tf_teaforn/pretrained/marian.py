"""Marian (opus-mt) as Hugging Face keeps it: config.json, model.safetensors, vocabularies."""

from tf_teaforn.data.marian_tokenizer import (
    SOURCE_FILE,
    TARGET_FILE,
    VOCABULARY_FILE,
    MarianTokenizer,
)
from tf_teaforn.errors import UserError
from tf_teaforn.pretrained.bart_layout import BartLayout, check_ids
from tf_teaforn.pretrained.importer import naming, read_files, refuse_added_tokens

# What our layers compute.
_FIXED = {
    "share_encoder_decoder_embeddings": True,
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
}


class Marian(BartLayout):
    """Post-norm, attention with biases, half-split sinusoids, a constant bias of the logits."""

    model = "marian"
    types = ("marian",)
    layers = {"norm": "post", "position_signal": "half_split"}

    def __init__(self, folder):
        super().__init__(folder)
        settings = self._settings
        for name, value in _FIXED.items():
            if settings.get(name, value) != value:
                raise UserError(f"{self._origin}: {name} {settings[name]} is not supported.")
        files = read_files(folder, SOURCE_FILE, TARGET_FILE, VOCABULARY_FILE)
        with naming(folder):
            self.tokenizer = MarianTokenizer(files)
        self.order = self.tokenizer.order
        refuse_added_tokens(folder, len(self.order))
        pad, eos = self.order[:2]
        expected = {
            "vocab_size": len(self.order),
            "pad_token_id": pad,
            "eos_token_id": eos,
            "decoder_start_token_id": pad,
        }
        check_ids(settings, self._origin, VOCABULARY_FILE, expected)
        if len(codes := self.tokenizer.languages) > 1:
            shown = ", ".join(codes[:5]) + (", ..." if len(codes) > 5 else "")
            self.notes += (
                f"It has {len(codes)} target languages: a source begins with one of {shown}",
            )

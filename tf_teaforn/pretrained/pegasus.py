"""PEGASUS as Hugging Face keeps it: config.json, model.safetensors, spiece.model."""

from tf_teaforn.data.pegasus_tokenizer import SENTENCEPIECE_FILE, SHIFT, PegasusTokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.pretrained.bart_layout import BartLayout
from tf_teaforn.pretrained.importer import naming, read_files, refuse_added_tokens
from tf_teaforn.pretrained.tensors import settings_if_any

_IDS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


class Pegasus(BartLayout):
    """Pre-norm, attention with biases, half-split sinusoids (Google's have another divisor)."""

    model = "pegasus"
    types = ("pegasus",)
    layers = {"position_signal": "half_split"}

    def __init__(self, folder):
        super().__init__(folder)
        ids = {name: self._settings.get(name, i) for name, i in _IDS.items()}
        if ids != _IDS:
            raise UserError(f"{self._origin}: PEGASUS has {_IDS}, this has {ids}.")
        files = read_files(folder, SENTENCEPIECE_FILE)
        shift = settings_if_any(folder, "tokenizer_config.json").get("offset", SHIFT)
        size = self._settings.get("vocab_size")
        if not isinstance(size, int):
            raise UserError(f"{self._origin} has no vocab_size.")
        with naming(folder / SENTENCEPIECE_FILE):
            self.tokenizer = PegasusTokenizer(files, shift, size)
        refuse_added_tokens(folder, self.tokenizer.end)

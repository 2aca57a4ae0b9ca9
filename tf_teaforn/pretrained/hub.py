"""KerasHub's presets of BART and T5 with their tokenizers: `--model=keras_nlp:<preset>`."""

import keras_nlp

from tf_teaforn.data import byte_pair_tokenizer, t5_tokenizer
from tf_teaforn.models.presets import from_preset, load_backbone, seq2seq_of
from tf_teaforn.pretrained.importer import Pretrained


class HubPreset(Pretrained):
    """What `keras_nlp.models.Backbone.from_preset` takes: a preset's name, an address that begins
    with hf:// or kaggle://, or a folder that `save_to_preset` wrote."""

    def __init__(self, name):
        self.model = name
        self._backbone = load_backbone(name)
        tokenizer = from_preset(keras_nlp.models.Tokenizer, name)
        size = self._backbone.vocabulary_size
        if isinstance(self._backbone, keras_nlp.models.BartBackbone):
            files = byte_pair_tokenizer.vocabulary_files(tokenizer.vocabulary, tokenizer.merges)
            self.tokenizer = byte_pair_tokenizer.BytePairTokenizer(files, size)
        else:
            files = {t5_tokenizer.SENTENCEPIECE_FILE: tokenizer.proto}
            self.tokenizer = t5_tokenizer.T5Tokenizer(files, size)

    def build(self, dtype=None, dropout=None):
        return seq2seq_of(self._backbone, dtype, dropout)

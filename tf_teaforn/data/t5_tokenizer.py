"""T5's vocabulary: a SentencePiece model whose ids are the model's."""

from collections.abc import Mapping

import tensorflow as tf

from tf_teaforn.data.tokenizer import (
    EOS_ID,
    PAD_ID,
    UNK_ID,
    SubwordTokenizer,
    check_ids_fit,
    join_pieces,
    load_sentencepiece,
    sentencepiece_operations,
)
from tf_teaforn.errors import UserError

SENTENCEPIECE_FILE = "spiece.model"


class T5Tokenizer(SubwordTokenizer):
    """SentencePiece as it is: 0 is padding, 1 EOS, 2 an unknown symbol.

    White space, newlines among it, is normalised as the SentencePiece model says. Names of special
    tokens inside a text, such as <extra_id_0>, are text.

    Args:
      files: "spiece.model".
      vocabulary_size: of the model, which has more ids than the vocabulary; the rest has no text.

    Attributes:
      end: number of ids that the vocabulary has.

    Raises:
      UserError: not a SentencePiece model of this kind.
    """

    kind = "t5"

    def __init__(self, files: Mapping[str, bytes], vocabulary_size: int):
        model_bytes = files[SENTENCEPIECE_FILE]
        processor = load_sentencepiece(model_bytes)
        special_ids = (processor.pad_id(), processor.eos_id(), processor.unk_id())
        if special_ids != (PAD_ID, EOS_ID, UNK_ID):
            raise UserError(
                f"{SENTENCEPIECE_FILE} is not a vocabulary of T5: pad, eos and unk are at "
                f"{', '.join(map(str, special_ids))} instead of 0, 1, 2."
            )
        self.end = processor.get_piece_size()
        check_ids_fit(SENTENCEPIECE_FILE, self.end, vocabulary_size)
        super().__init__(files, {"vocabulary_size": vocabulary_size}, vocabulary_size)
        self._unknown_text = processor.decode([UNK_ID])
        self._sentencepiece = sentencepiece_operations(model_bytes)

    def tokenize(self, strings) -> tf.RaggedTensor:
        return self._sentencepiece.tokenize(strings)

    def _join(self, rows: tf.RaggedTensor) -> tf.Tensor:
        has_text = (rows > UNK_ID) & (rows < self.end)
        rows = tf.ragged.boolean_mask(rows, has_text)
        return join_pieces(self._sentencepiece, rows, self._unknown_text)

"""PEGASUS' vocabulary: a SentencePiece model, its ids shifted to make room for reserved ones."""

from collections.abc import Mapping

import tensorflow as tf

from tf_teaforn.data.tokenizer import (
    EOS_ID,
    NEWLINE_PIECE,
    SubwordTokenizer,
    load_sentencepiece,
    sentencepiece_operations,
)
from tf_teaforn.errors import UserError

SENTENCEPIECE_FILE = "spiece.model"
# Ids of google-research/pegasus and of Hugging Face's tokenizer, which the public weights have.
MASK_SENTENCE_ID = 2
MASK_WORD_ID = 3
SHIFT = 103


class PegasusTokenizer(SubwordTokenizer):
    r"""SentencePiece ids above 1 plus 103.

    0 is padding, 1 EOS, 2 a masked sentence (Hugging Face: <mask_1>), 3 a masked word (<mask_2>),
    4 to 104 are reserved; 105 is an unknown symbol. A "\n" inside a text is the piece "<n>", as
    google-research/pegasus has it. White space is normalised by the SentencePiece model.

    Args:
      files: "spiece.model".
      shift: what is added to SentencePiece's ids.
      vocabulary_size: of the model, if it has more ids than the vocabulary; the rest has no text.

    Raises:
      UserError: not a SentencePiece model of this kind.
    """

    kind = "pegasus"

    def __init__(
        self, files: Mapping[str, bytes], shift: int = SHIFT, vocabulary_size: int | None = None
    ):
        model_bytes = files[SENTENCEPIECE_FILE]
        processor = load_sentencepiece(model_bytes)
        special_ids = (processor.eos_id(), processor.unk_id())
        if special_ids != (EOS_ID, 2) or processor.piece_to_id(NEWLINE_PIECE) == 2:
            raise UserError(
                f"{SENTENCEPIECE_FILE} is not a vocabulary of PEGASUS: eos and unk are at "
                f'{", ".join(map(str, special_ids))} instead of 1, 2, or there is no "<n>".'
            )
        self._end = processor.get_piece_size() + shift
        vocabulary_size = vocabulary_size or self._end
        if vocabulary_size < self._end:
            raise UserError(
                f"{SENTENCEPIECE_FILE} has ids up to {self._end - 1}, the model has "
                f"{vocabulary_size} tokens: they do not belong together."
            )
        settings = {"shift": shift, "vocabulary_size": vocabulary_size}
        super().__init__(files, settings, vocabulary_size)
        self._shift = shift
        self._sentencepiece = sentencepiece_operations(model_bytes)

    def tokenize(self, strings) -> tf.RaggedTensor:
        ids = self._sentencepiece.tokenize(tf.strings.regex_replace(strings, "\n", NEWLINE_PIECE))
        return ids + self._shift

    def _join(self, rows: tf.RaggedTensor) -> tf.Tensor:
        has_text = (rows >= self._shift + 2) & (rows < self._end)
        rows = tf.ragged.boolean_mask(rows, has_text)
        texts = self._sentencepiece.detokenize(rows - self._shift)
        return tf.strings.regex_replace(texts, NEWLINE_PIECE, "\n")

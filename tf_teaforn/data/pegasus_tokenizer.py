"""PEGASUS' vocabulary: a SentencePiece model, its ids shifted to make room for reserved ones."""

from collections.abc import Mapping

import tensorflow as tf

from tf_teaforn.data.tokenizer import (
    EOS_ID,
    NEWLINE_PIECE,
    SubwordTokenizer,
    check_ids_fit,
    load_sentencepiece,
    sentencepiece_operations,
)
from tf_teaforn.errors import UserError

SENTENCEPIECE_FILE = "spiece.model"
# Ids of google-research/pegasus and of Hugging Face's tokenizer, which the public weights have.
_MASKS = {"<mask_1>": 2, "<mask_2>": 3}
SHIFT = 103


class PegasusTokenizer(SubwordTokenizer):
    r"""SentencePiece ids above 1 plus 103.

    0 is padding, 1 EOS, 2 a masked sentence, 3 a masked word, 4 to 104 are reserved; 105 is an
    unknown symbol. A "\n" inside a text is the piece "<n>", as google-research/pegasus has it;
    "<mask_1>" and "<mask_2>", Hugging Face's signs of the masks, are ids 2 and 3, and what stands
    between them is tokenised by itself. Other reserved ids cannot be written, nor are any shown in
    a text. White space is normalised by the SentencePiece model: ids are those of the sentencepiece
    library, where transformers 5 keeps the space at a text's end.

    Args:
      files: "spiece.model".
      shift: what is added to SentencePiece's ids.
      vocabulary_size: of the model, if it has more ids than the vocabulary; the rest has no text.

    Attributes:
      end: number of ids that the vocabulary has.

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
        self.end = processor.get_piece_size() + shift
        vocabulary_size = vocabulary_size or self.end
        check_ids_fit(SENTENCEPIECE_FILE, self.end, vocabulary_size)
        settings = {"shift": shift, "vocabulary_size": vocabulary_size}
        super().__init__(files, settings, vocabulary_size)
        self._shift = shift
        self._sentencepiece = sentencepiece_operations(model_bytes)

    def tokenize(self, strings) -> tf.RaggedTensor:
        strings = tf.strings.regex_replace(strings, "\n", NEWLINE_PIECE)
        # No UTF-8 has the byte 255.
        apart = tf.strings.regex_replace(strings, f"({'|'.join(_MASKS)})", b"\xff\\1\xff")
        parts = tf.strings.split(apart, b"\xff")
        mask_ids = sum(
            tf.where(parts.values == mask, mask_id, 0) for mask, mask_id in _MASKS.items()
        )
        is_mask = mask_ids > 0
        ids = self._sentencepiece.tokenize(tf.where(is_mask, "", parts.values)) + self._shift
        masks = tf.RaggedTensor.from_row_lengths(
            tf.boolean_mask(mask_ids, is_mask), tf.cast(is_mask, tf.int64)
        )
        return parts.with_values(tf.concat([masks, ids], axis=1)).merge_dims(1, 2)

    def _join(self, rows: tf.RaggedTensor) -> tf.Tensor:
        has_text = (rows >= self._shift + 2) & (rows < self.end)
        rows = tf.ragged.boolean_mask(rows, has_text)
        texts = self._sentencepiece.detokenize(rows - self._shift)
        return tf.strings.regex_replace(texts, NEWLINE_PIECE, "\n")

"""The vocabulary of opus-mt: two SentencePiece models and the ids of their pieces."""

import json
import re
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tf_teaforn.data.tokenizer import (
    SubwordTokenizer,
    ids_with_special_first,
    load_sentencepiece,
    sentencepiece_operations,
)
from tf_teaforn.errors import UserError

SOURCE_FILE = "source.spm"
TARGET_FILE = "target.spm"
VOCABULARY_FILE = "vocab.json"

# Up to the first "<<": others belong to the text.
_LANGUAGE = r"^>>[\s\S]*?<<"


class MarianTokenizer(SubwordTokenizer):
    """Pieces of one SentencePiece model for sources and of another for targets, one set of ids.

    A source may begin with the language of the target, as in ">>fra<< text". A piece without an id
    is the unknown symbol.

    Args:
      files: "source.spm", "target.spm" and "vocab.json".
      target: whether this is the tokenizer of targets.

    Attributes:
      languages: the codes that sources may begin with.

    Raises:
      UserError: a file is damaged, or a special token is missing.
    """

    kind = "marian"

    def __init__(self, files: Mapping[str, bytes], target: bool = False):
        try:
            ids = json.loads(files[VOCABULARY_FILE])
            vocabulary_size = len(ids)
            if sorted(ids.values()) != list(range(vocabulary_size)):
                raise ValueError("the ids are not 0, 1, 2 and so on")
            pad, eos, unk = (ids[name] for name in ("<pad>", "</s>", "<unk>"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{VOCABULARY_FILE} is no vocabulary of Marian: {error!r}.") from None
        super().__init__(files, {"target": True} if target else {}, vocabulary_size)
        self.order = ids_with_special_first(vocabulary_size, pad, eos)
        ours = np.argsort(self.order)
        name = TARGET_FILE if target else SOURCE_FILE
        model_bytes = files[name]
        load_sentencepiece(model_bytes, name)
        self._sentencepiece = sentencepiece_operations(model_bytes, out_type=tf.string)
        self._ids = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(
                list(ids), [int(ours[i]) for i in ids.values()], tf.string, tf.int64
            ),
            int(ours[unk]),
        )
        texts = [""] * vocabulary_size
        for piece, i in ids.items():
            texts[ours[i]] = "" if i in (pad, eos, unk) else piece
        self._texts = texts
        self.languages = [piece for piece in ids if re.fullmatch(_LANGUAGE, piece)]
        self._targets = None if target else MarianTokenizer(files, target=True)

    @property
    def targets(self) -> "MarianTokenizer":
        return self._targets or self

    def tokenize(self, strings) -> tf.RaggedTensor:
        strings = tf.convert_to_tensor(strings)
        language = tf.where(
            tf.strings.regex_full_match(strings, f"{_LANGUAGE}[\\s\\S]*"),
            tf.strings.regex_replace(strings, f"({_LANGUAGE})[\\s\\S]*", r"\1"),
            "",
        )
        rest = tf.strings.regex_replace(strings, _LANGUAGE, "")
        pieces = self._sentencepiece.tokenize(rest)
        codes = tf.ragged.boolean_mask(language[:, None], language[:, None] != "")
        pieces = tf.concat([codes, pieces], axis=1)
        ids = self._ids.lookup(pieces.flat_values)
        return pieces.with_flat_values(tf.cast(ids, tf.int32))

    def _join(self, rows: tf.RaggedTensor) -> tf.Tensor:
        pieces = tf.gather(tf.constant(self._texts), rows)
        texts = self._sentencepiece.detokenize(tf.ragged.boolean_mask(pieces, pieces != ""))
        return tf.strings.strip(tf.strings.regex_replace(texts, "▁", " "))

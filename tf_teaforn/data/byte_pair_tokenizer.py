"""Byte-level BPE as GPT-2 and BART have it (Radford et al. 2019, section 2.2), in the graph.

KerasHub's layer for it divides runs of white space in another way, and keeps a table that changes
while it runs, which a served model must not.
"""

import json
from collections.abc import Mapping

import numpy as np
import tensorflow as tf
import tensorflow_text

from tf_teaforn.data.tokenizer import SubwordTokenizer, check_ids_fit, ids_with_special_first
from tf_teaforn.errors import UserError

VOCABULARY_FILE = "vocab.json"
MERGES_FILE = "merges.txt"

# Unicode's White_Space, which RE2's \s is not.
_SPACE = r"\t-\r \x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
# Marks where a run of white space is divided: its last character belongs to the word that follows,
# for which GPT-2's pattern looks ahead and RE2 cannot. No text has this character: it is none.
_MARK = "\uffff"
_WORD = "|".join(
    (
        "'s|'t|'re|'ve|'m|'ll|'d",
        r" ?\pL+",
        r" ?\pN+",
        rf" ?[^{_SPACE}\pL\pN{_MARK}]+",
        f"[{_SPACE}]+",
        _MARK,
    )
)
# Words up to so many bytes are merged together; the loop over them takes as many steps.
_SHORT = 32
# Longer words are cut into parts of so many bytes, as time grows with the square of their length.
_LONGEST = 1024


class BytePairTokenizer(SubwordTokenizer):
    """BART's vocabulary: `<s>` in front of every text, merges of bytes behind it.

    Names of special tokens inside a text are text. U+FFFF is dropped. A word of more than 1,024
    bytes is cut into parts of so many, which are merged each by itself.

    Args:
      files: "vocab.json" and "merges.txt".
      vocabulary_size: of the model, if it has more ids than the vocabulary; the rest has no text.
        It may lack `<mask>`, which no text has.

    Attributes:
      end: number of ids that the vocabulary has.

    Raises:
      UserError: the files are damaged, do not belong together, or lack a byte.
    """

    kind = "byte_pair"

    def __init__(self, files: Mapping[str, bytes], vocabulary_size: int | None = None):
        try:
            ids = json.loads(files[VOCABULARY_FILE])
            # facebook/bart-large-cnn: RoBERTa's vocabulary without its last row.
            if vocabulary_size and ids.get("<mask>", 0) >= vocabulary_size:
                del ids["<mask>"]
            merges = [
                tuple(line.split(" "))
                for line in files[MERGES_FILE].decode().split("\n")
                if line and not line.startswith("#version")
            ]
            start, pad, eos, unk = (ids[name] for name in ("<s>", "<pad>", "</s>", "<unk>"))
            results = [(ids[a], ids[b], ids[a + b]) for a, b in merges]
            end = max(ids.values()) + 1
            if min(ids.values()) < 0:
                raise ValueError("an id is below 0")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{VOCABULARY_FILE} and {MERGES_FILE} are no vocabulary of BART: {error!r}."
            ) from None
        self.end = end
        vocabulary_size = vocabulary_size or end
        check_ids_fit(VOCABULARY_FILE, end, vocabulary_size)
        super().__init__(files, {"vocabulary_size": vocabulary_size}, vocabulary_size)
        # Everything below is in our ids.
        self.order = ids_with_special_first(vocabulary_size, pad, eos)
        ours = np.argsort(self.order)
        self._start = int(ours[start])
        letters = _letters()
        if missing := sum(letter not in ids for letter in letters):
            raise UserError(
                f"{VOCABULARY_FILE} is not BART's: {missing} of 256 bytes have no token in it, so "
                "that it cannot spell every text."
            )
        self._byte_ids = np.array([ours[ids[letter]] for letter in letters], "int64")
        pairs = np.array(results, "int64").reshape(-1, 3)
        keys = ours[pairs[:, 0]] * vocabulary_size + ours[pairs[:, 1]]
        self._ranks = np.argsort(keys, kind="stable")
        self._keys = keys[self._ranks]
        self._merged = ours[pairs[:, 2]][self._ranks]
        byte_of = {letter: bytes([i]) for i, letter in enumerate(letters)}
        texts = [b""] * vocabulary_size
        for token, i in ids.items():
            if i not in (start, pad, eos, unk) and all(c in byte_of for c in token):
                texts[ours[i]] = b"".join(byte_of[c] for c in token)
        texts[ours[unk]] = b""
        if "<mask>" in ids:
            texts[ours[ids["<mask>"]]] = b""
        self._texts = texts

    def tokenize(self, strings) -> tf.RaggedTensor:
        spaces = f"([{_SPACE}]+)([{_SPACE}])([^{_SPACE}])"
        strings = tf.strings.regex_replace(strings, _MARK, "")
        marked = tf.strings.regex_replace(strings, spaces, rf"\1{_MARK}\2\3")
        words = tensorflow_text.regex_split(marked, _WORD, _WORD)
        words = tf.ragged.boolean_mask(words, words != _MARK)
        unique, places = tf.unique(words.flat_values)
        tokens = tf.gather(self._merge(unique), words.with_flat_values(places))
        tokens = tokens.merge_dims(1, 2)
        start = tf.fill([tokens.nrows(), 1], tf.constant(self._start, tf.int32))
        return tf.concat([start, tokens], axis=1)

    def _merge(self, words):
        """Strings [U] to int32 [U, (T)]."""
        starts = tf.ragged.range(0, tf.strings.length(words), _LONGEST)
        parts = tf.repeat(words, starts.row_lengths())
        sizes = tf.fill(tf.shape(starts.values), _LONGEST)
        parts = tf.strings.substr(parts, starts.values, sizes)
        lengths = tf.strings.length(parts)
        groups = [tf.where(chosen)[:, 0] for chosen in (lengths <= _SHORT, lengths > _SHORT)]
        rows = [self._merge_alike(tf.gather(parts, group)) for group in groups]
        back = tf.argsort(tf.concat(groups, axis=0))
        merged = tf.gather(tf.concat(rows, axis=0), back)
        return starts.with_values(merged).merge_dims(1, 2)

    def _merge_alike(self, words):
        """The same, with room for the longest word in every row.

        Each step merges in every word the pair of the lowest rank, the first of several.
        """
        letters = tf.strings.bytes_split(words)
        codes = tf.reshape(tf.io.decode_raw(letters.flat_values, tf.uint8), [-1])
        ids = tf.gather(self._byte_ids, tf.cast(codes, tf.int32))
        ids = letters.with_flat_values(ids).to_tensor(-1)
        none = len(self._keys)
        # One entry more, so that there is one where no pair is found.
        keys = tf.constant(np.append(self._keys, -2), tf.int64)
        ranks = tf.constant(np.append(self._ranks, none), tf.int64)
        merged = tf.constant(np.append(self._merged, -1), tf.int64)

        def pairs(ids):
            left, right = ids[:, :-1], ids[:, 1:]
            key = tf.where(
                right < 0, tf.constant(-1, tf.int64), left * self.vocabulary_size + right
            )
            flat = tf.reshape(key, [-1])
            entries = tf.searchsorted(keys[:-1], flat)
            entries = tf.where(tf.gather(keys, entries) == flat, entries, none)
            entries = tf.reshape(entries, tf.shape(key))
            # A column that never wins, for words of one byte.
            return tf.pad(entries, [[0, 0], [0, 1]], constant_values=none)

        def step(ids, entries):
            best = tf.argmin(tf.gather(ranks, entries), axis=1)[:, None]
            entry = tf.gather(entries, best, axis=1, batch_dims=1)
            places = tf.range(tf.shape(ids, tf.int64)[1])[None]
            shifted = tf.pad(ids[:, 1:], [[0, 0], [0, 1]], constant_values=-1)
            found = entry < none
            ids = tf.where(found & (places > best), shifted, ids)
            ids = tf.where(found & (places == best), tf.gather(merged, entry), ids)
            return ids, pairs(ids)

        ids, _ = tf.while_loop(
            lambda ids, entries: tf.reduce_any(entries < none),
            step,
            (ids, pairs(ids)),
            shape_invariants=(tf.TensorShape([None, None]), tf.TensorShape([None, None])),
        )
        return tf.cast(tf.RaggedTensor.from_tensor(ids, padding=tf.constant(-1, tf.int64)), "int32")

    def _join(self, rows: tf.RaggedTensor) -> tf.Tensor:
        texts = tf.gather(tf.constant(self._texts, tf.string), rows)
        joined = tf.strings.reduce_join(texts, axis=1)
        return tf.strings.unicode_transcode(joined, "UTF-8", "UTF-8", errors="replace")


def vocabulary_files(ids: Mapping[str, int], merges) -> dict[str, bytes]:
    """The files of a vocabulary kept in another way; each merge is "a b"."""
    return {
        VOCABULARY_FILE: json.dumps(dict(ids)).encode(),
        MERGES_FILE: ("\n".join(["#version: 0.2", *merges]) + "\n").encode(),
    }


def _letters():
    """The character that a vocabulary has for each byte: itself if printable, else one from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    printable += range(ord("®"), ord("ÿ") + 1)
    others = (i for i in range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]

"""SentencePiece vocabularies: trained by sentencepiece, applied in the TensorFlow graph."""

import hashlib
import io
import json
import logging
import os
import random
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import sentencepiece
import tensorflow as tf
import tensorflow_text
from etils import epath
from tensorflow_text.python.ops import sentencepiece_tokenizer

from tf_teaforn.errors import UserError
from tf_teaforn.paths import write_whole

PAD_ID = 0
EOS_ID = 1
UNK_ID = 2
NEWLINE_PIECE = "<n>"
VOCABULARY_FILE = "vocab.model"
# Characters of a line that vocabularies are trained on at a time.
_LONGEST_LINE = 4_000
# Far beyond any model's; tables of ids are made before the model that they belong to.
_MOST_SUBWORDS = 2**24

_logger = logging.getLogger(__name__)


def check_ids_fit(file: str, end: int, vocabulary_size: int) -> None:
    """Raises `UserError` where a model has fewer tokens than its vocabulary, which has `end`."""
    if vocabulary_size < end:
        raise UserError(
            f"{file} has ids up to {end - 1}, the model has {vocabulary_size} tokens: they do not "
            "belong together."
        )


def train_sentencepiece(
    sentences: Iterable[str],
    vocabulary_size: int,
    output_path: str | os.PathLike,
    *,
    character_coverage: float = 0.9995,
    input_sentence_size: int = 5_000_000,
    input_characters: int = 300_000_000,
    symbols: Sequence[str] = (),
) -> None:
    r"""Trains a unigram vocabulary and writes it, whole or not at all, to `output_path`.

    The same sentences, arguments and version of sentencepiece give the same file, byte for byte.
    Text is taken as it is (no Unicode normalisation, no space dropped), and a character without a
    piece of its own is spelled in bytes, so that `Tokenizer` gives back what it was given.

    Args:
      sentences: texts; a "\n" inside one separates two sentences.
      vocabulary_size: number of pieces, the three special ones and "<n>" included.
      output_path: the `.model` file to write; may be remote.
      character_coverage: share of all characters whose characters get a piece.
      input_sentence_size: the most sentences to train on, above 100; of more, so many are drawn.
      input_characters: the most characters to train on, above the 4,000 of the longest sentence. Of
        more, whole sentences are drawn from all of the text, not from its beginning; which ones
        follows from the sentences alone. Training needs about 17 bytes of memory for each.
      symbols: strings that are a piece of their own wherever they stand in a text.

    Raises:
      UserError: there is no text, or `vocabulary_size` does not fit it.

    Reference: Kudo, Subword Regularization, 2018 (unigram model); github.com/google/sentencepiece.
    """
    lines = (line for text in sentences for line in text.split("\n"))
    # Before sentencepiece has its turn, which would make a RuntimeError of any error.
    parts = _draw((part for line in lines for part in _parts(line)), input_characters)
    if not parts:
        raise UserError("There is no text to train a vocabulary on.")
    model = io.BytesIO()
    # Which sentences are drawn is fixed in sentencepiece 0.2.3 and follows this in older ones.
    sentencepiece.set_random_generator_seed(0)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(parts),
            model_writer=model,
            model_type="unigram",
            # Without room for the special pieces it does not say that the size is too small.
            vocab_size=max(vocabulary_size, UNK_ID + 1),
            pad_id=PAD_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            bos_id=-1,
            user_defined_symbols=[NEWLINE_PIECE, *symbols],
            byte_fallback=True,
            character_coverage=character_coverage,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            input_sentence_size=input_sentence_size,
            shuffle_input_sentence=True,
            # Longer sentences are left out; the default of 4192 bytes drops most documents.
            max_sentence_length=1_000_000,
            # The result depends on it, so it must not follow the machine's number of cores.
            num_threads=16,
            minloglevel=1,
        )
    except (RuntimeError, ValueError) as error:
        raise _vocabulary_size_error(vocabulary_size, str(error)) from None

    output_path = epath.Path(output_path)
    output_path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output_path, model.getvalue())


def _draw(parts: Iterable[str], most_characters: int) -> list[str]:
    """As many of `parts` as have up to so many characters, in their order.

    Each gets a random number; where there are too many, those of the highest numbers go. So all of
    the text has the same share in what is kept, and what comes later takes no more memory.
    """
    draw = random.Random(0)
    kept: list[tuple[float, str]] = []
    limit = 1.0
    count = characters = total = 0
    for part in parts:
        place = draw.random()
        count += 1
        total += len(part)
        if place < limit:
            kept.append((place, part))
            characters += len(part)
        while characters > most_characters:
            limit *= 0.95
            kept = [(place, part) for place, part in kept if place < limit]
            characters = sum(len(part) for _, part in kept)
    if len(kept) < count:
        _logger.info(
            "Training the vocabulary on %d of %d sentences, drawn from all: %d of %d characters "
            "(%.1f%%)",
            len(kept),
            count,
            characters,
            total,
            100 * characters / total,
        )
    return [part for _, part in kept]


def _parts(line: str) -> Iterator[str]:
    """`line` cut between words, if it is long; nothing of an empty one.

    SentencePiece takes time that grows with the square of a line's length where the line repeats
    itself: half an hour for 1 MB. Pieces lie within words, so they are the same.
    """
    while len(line) > _LONGEST_LINE:
        cut = line.rfind(" ", 1, _LONGEST_LINE)
        end, start = (cut, cut + 1) if cut > 0 else (_LONGEST_LINE, _LONGEST_LINE)
        yield line[:end]
        line = line[start:]
    if line:
        yield line


def _vocabulary_size_error(vocabulary_size: int, message: str) -> Exception:
    """Says in the user's words what sentencepiece found wrong with the size."""
    if high := re.search(r"size too high .*<= (\d+)", message):
        return UserError(
            f"--vocab_size={vocabulary_size} is too large for this text: the highest possible"
            f" value is {high[1]}. Lower it or give more text."
        )
    if low := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return UserError(
            f"--vocab_size={vocabulary_size} is too small for this text: its characters and all"
            f" bytes alone need {low[1]} pieces. Raise it."
        )
    return RuntimeError(f"sentencepiece could not train a vocabulary: {message}")


def add_eos(tokens: tf.RaggedTensor, max_length: int) -> tf.RaggedTensor:
    """Cuts every row to `max_length - 1` ids and ends it in EOS, which is thus never lost.

    Args:
      tokens: int32 [B, (T)], without EOS.
      max_length: longest row of the result, EOS included; at least 1.
    """
    tokens = tokens[:, : max_length - 1]
    return tf.concat([tokens, tf.fill([tokens.nrows(), 1], EOS_ID)], axis=1)


class _SharedModel(sentencepiece_tokenizer._SentencepieceModelResource):
    """The vocabulary under a name of its own.

    tensorflow_text gives it to the operator's kernel, and `tf.random.set_seed` drops all kernels:
    every tokenizer made before would stop working.
    """

    def __init__(self, model_bytes, shared_name):
        self._shared_name = shared_name
        super().__init__(model_bytes, name=None)

    def _create_resource(self):
        operators = sentencepiece_tokenizer.gen_sentencepiece_tokenizer
        return operators.sentencepiece_op(model=self._model, shared_name=self._shared_name)


def ids_with_special_first(vocabulary_size: int, pad: int, eos: int) -> np.ndarray:
    """For a foreign vocabulary, which of its ids each of ours is: padding, EOS, then the others.

    Args:
      pad, eos: foreign ids.

    Returns:
      int [V].
    """
    others = [i for i in range(vocabulary_size) if i not in (pad, eos)]
    return np.array([pad, eos, *others])


def sentencepiece_operations(
    model_bytes: bytes, out_type=tf.int32
) -> tensorflow_text.SentencepieceTokenizer:
    """tensorflow_text's tokenizer of a `.model` file, to be used in any graph and exported."""
    operations = tensorflow_text.SentencepieceTokenizer(model_bytes, out_type=out_type)
    name = hashlib.sha256(model_bytes).hexdigest()
    operations._model_resource = _SharedModel(model_bytes, name)
    return operations


def load_sentencepiece(
    model_bytes: bytes, name: str | None = None
) -> sentencepiece.SentencePieceProcessor:
    """The sentencepiece library's own tokenizer.

    Args:
      model_bytes: content of a `.model` file.
      name: the file's, for messages, where a family has several.

    Raises:
      UserError: `model_bytes` is no SentencePiece model.
    """
    processor = sentencepiece.SentencePieceProcessor()
    try:
        if not model_bytes:
            raise RuntimeError("no bytes")
        processor.LoadFromSerializedProto(model_bytes)
    except RuntimeError:
        pointer = model_bytes.startswith(b"version https://git-lfs")
        found = "a pointer of git-lfs, not the file: git lfs pull" if pointer else "a truncated one"
        raise UserError(
            f"{f'{name}: ' if name else ''}not a SentencePiece model, or {found} "
            f"({len(model_bytes)} bytes)."
        ) from None
    return processor


def join_pieces(operations, rows: tf.RaggedTensor, unknown_text: str) -> tf.Tensor:
    """int32 [B, (T)] to strings [B], as the sentencepiece library has them.

    Args:
      operations: of `sentencepiece_operations`; its unknown symbol has id 2.
      unknown_text: what it writes for the unknown symbol.
    """
    # The SentencePiece inside tensorflow_text drops all leading spaces of a text where one is the
    # mark of a word's beginning. A piece in front keeps them; it is taken off again.
    guard = tf.fill([rows.nrows(), 1], UNK_ID)
    texts = operations.detokenize(tf.concat([guard, rows], axis=1))
    return tf.strings.regex_replace(
        texts, "^" + re.escape(unknown_text) + " ?", "", replace_global=False
    )


class SubwordTokenizer(tf.Module):
    """Text to ids and back as TensorFlow operations, for tf.data and SavedModels alike.

    This is all that training, search and export ask of a tokenizer. A family of pretrained models
    implements `tokenize` and `_join`, and is listed in `data/tokenizers.py`.

    Ids are our models': 0 is padding, 1 the end of sentence (EOS). A family that has them
    elsewhere permutes its ids here, and its importer the rows of its embedding likewise.

    A tokenizer is a function of its files and settings, which a model directory keeps, so the
    constructor must take them: `cls(files, **settings)`.

    Args:
      files: {file name: content}.
      settings: {name: value that JSON has}.
      vocabulary_size: number of ids.

    Attributes:
      kind: name of the class in `data/tokenizers.py`.
      fingerprint: SHA-256, in hexadecimal, of all that ids depend on.
      targets: the tokenizer of target texts and of outputs: this one, unless the family has one
        for each side.
    """

    kind: str

    def __init__(
        self, files: Mapping[str, bytes], settings: Mapping[str, Any], vocabulary_size: int
    ):
        super().__init__(name="tokenizer")
        if type(vocabulary_size) is not int or not 0 < vocabulary_size <= _MOST_SUBWORDS:
            raise UserError(f"A vocabulary of {vocabulary_size!r} subwords cannot be used.")
        # Proxies, because tf.Module would take a dict to pieces.
        self.files = types.MappingProxyType(dict(files))
        self.settings = types.MappingProxyType(dict(settings))
        self.vocabulary_size = vocabulary_size
        digest = hashlib.sha256(b"".join(files.values()))
        if settings:
            digest.update(json.dumps([self.kind, dict(settings)], sort_keys=True).encode())
        self.fingerprint = digest.hexdigest()

    @property
    def targets(self) -> "SubwordTokenizer":
        return self

    def tokenize(self, strings) -> tf.RaggedTensor:
        """Strings [B] to int32 [B, (T)], without EOS."""
        raise NotImplementedError

    def _join(self, rows: tf.RaggedTensor) -> tf.Tensor:
        """int32 [B, (T)], without padding and EOS, to strings [B]."""
        raise NotImplementedError

    def encode(self, strings, max_length: int) -> tf.Tensor:
        """Strings [B] to int32 [B, S], every row ended in EOS and filled up with padding.

        A row is cut to `max_length - 1` ids before it gets its EOS; S is the longest row.
        """
        return add_eos(self.tokenize(strings), max_length).to_tensor(PAD_ID)

    def detokenize(self, ids) -> tf.Tensor:
        """int32 [B, T] to strings [B]: what stands before the first EOS, padding left out.

        Bytes that form no UTF-8 become U+FFFD. Ids must be below `vocabulary_size`.
        """
        ids = tf.convert_to_tensor(ids, tf.int32)
        ended = tf.cumsum(tf.cast(ids == EOS_ID, tf.int32), axis=1) > 0
        return self._join(tf.ragged.boolean_mask(ids, ~ended & (ids != PAD_ID)))


class Tokenizer(SubwordTokenizer):
    r"""A SentencePiece model of `train_sentencepiece`, or another one with the same special ids.

    A "\n" inside a text is the piece "<n>". A literal "<n>" or "▁" (U+2581, SentencePiece's own
    sign for a space) in a text comes back as "\n" or " "; all other text comes back unchanged
    from a vocabulary of `train_sentencepiece`.

    Attributes:
      model_bytes: the serialised SentencePiece model, as in a `.model` file.

    Raises:
      UserError: `model_bytes` is no SentencePiece model, or has other special ids than ours.
    """

    kind = "sentencepiece"

    def __init__(self, files: Mapping[str, bytes]):
        self.model_bytes = files[VOCABULARY_FILE]
        processor = load_sentencepiece(self.model_bytes)
        special_ids = (processor.pad_id(), processor.eos_id(), processor.unk_id())
        if special_ids != (PAD_ID, EOS_ID, UNK_ID):
            raise UserError(
                f"a vocabulary must have pad, eos, unk at ids 0, 1, 2; this has them at"
                f" {', '.join(map(str, special_ids))}. Train it with bin/build_vocab, or with"
                " spm_train --pad_id=0 --eos_id=1 --unk_id=2 --bos_id=-1"
                " --user_defined_symbols='<n>' --byte_fallback."
            )
        super().__init__(files, {}, processor.get_piece_size())
        self._unknown_text = processor.decode([UNK_ID])
        self._sentencepiece = sentencepiece_operations(self.model_bytes)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tokenizer":
        """Reads a `.model` file; `path` may be remote."""
        try:
            return cls({VOCABULARY_FILE: epath.Path(path).read_bytes()})
        except UserError as error:
            raise UserError(f"{os.fspath(path)}: {error}") from None
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"{os.fspath(path)}: cannot read the vocabulary: {reason}.") from None

    def tokenize(self, strings) -> tf.RaggedTensor:
        return self._sentencepiece.tokenize(tf.strings.regex_replace(strings, "\n", NEWLINE_PIECE))

    def _join(self, rows: tf.RaggedTensor) -> tf.Tensor:
        texts = join_pieces(self._sentencepiece, rows, self._unknown_text)
        return tf.strings.regex_replace(texts, NEWLINE_PIECE, "\n")

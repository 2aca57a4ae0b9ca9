"""Gap sentences (Zhang et al. 2020, PEGASUS, section 3.1): a summary to learn from any document.

The sentences that say most about the rest of a document are taken out of it; the model reads the
document with a mask in their place, and writes them. Everything here works on one document, is a
pure function of it and the settings, and imports no TensorFlow, so that it runs in any process.
"""

import collections
import dataclasses
import hashlib
import random
import re

import sentencex

from tf_teaforn.errors import UserError

# Raised when the same documents give other pairs.
VERSION = 1
# PEGASUS' name of the token that stands for a sentence.
MASK = "<mask_1>"
SELECTIONS = ("ind_orig", "random", "lead")

_WIDE_SPACE = re.compile(r"[^\S\x00-\x7f]")
_WORD = re.compile("[a-z0-9]+")
# en, mhr, pt-br.
_LANGUAGE = re.compile("[A-Za-z]{2,3}([-_][A-Za-z]{2,8})*")
# The stochastic variant: noise on scores, and the least part of `ratio` that is drawn.
_NOISE = 0.2
_LEAST_PART = 1 / 3


@dataclasses.dataclass(frozen=True)
class GapSettings:
    """How gap sentences are chosen. The defaults are those of PEGASUS' HugeNews model.

    Attributes:
      ratio: share of a document's sentences to select, above 0 and below 1; at least one is.
      intact: probability that a selected sentence stays in the document unmasked.
      selection: "ind_orig": those whose own ROUGE-1 F against the rest of the document is highest;
        "random"; "lead": the first ones.
      stochastic: the published "mixed & stochastic" model's variant: the ratio is drawn for each
        document, evenly between a third of `ratio` (15% of 45%) and `ratio`, and scores are
        multiplied by 1 plus noise, even between -20% and 20%.
      max_words: what is used of a document: its first sentences, up to so many words.
      language: of the documents, as an ISO 639 code; for splitting into sentences.
      seed: of all that is random; at least 0.

    Raises:
      UserError: a value out of its range, named as the flag is.
    """

    ratio: float = 0.45
    intact: float = 0.2
    selection: str = "ind_orig"
    stochastic: bool = False
    max_words: int = 512
    language: str = "en"
    seed: int = 0

    def __post_init__(self):
        if not 0 < self.ratio < 1:
            raise UserError(f"--gap_ratio={self.ratio}: write a number above 0 and below 1.")
        if not 0 <= self.intact <= 1:
            raise UserError(f"--gap_intact={self.intact}: write a number from 0 to 1.")
        if self.selection not in SELECTIONS:
            raise UserError(
                f"--gap_selection={self.selection}: write one of {', '.join(SELECTIONS)}."
            )
        if self.max_words < 2:
            raise UserError(f"--gap_max_words={self.max_words}: write 2 or more.")
        if not _LANGUAGE.fullmatch(self.language):
            raise UserError(
                f"--gap_language={self.language}: write the ISO 639 code of a language, such as en."
            )
        if not 0 <= self.seed < 2**64:
            raise UserError(f"--gap_seed={self.seed}: write a number from 0, below 2^64.")


def split_sentences(document: str, language: str = "en") -> list[str]:
    r"""The sentences of a text, white space included: joined they are the text again.

    White space around a sentence belongs to it; no sentence is white space alone. The splitter is
    Wikimedia's sentencex: rules for some 300 languages, without a model to download, fast enough
    (about 50,000 sentences a second) to keep up with training.
    """
    sentences: list[str] = []
    for piece in _pieces(document, language):
        # White space before the first sentence joins it, all other the one it follows.
        if sentences and (piece.isspace() or sentences[-1].isspace()):
            sentences[-1] += piece
        else:
            sentences.append(piece)
    return sentences if document.strip() else []


def _pieces(document, language):
    """What sentencex cuts a text into, and what it leaves out, in order."""
    # sentencex 1.0.32 cannot take a no-break space and its like after a capital letter.
    text = _WIDE_SPACE.sub(" ", document)
    end = 0
    for plain in sentencex.segment(language, text):
        # Above 10 KiB it leaves out blank lines.
        start = text.index(plain, end)
        if end < start:
            yield document[end:start]
        end = start + len(plain)
        yield document[start:end]
    if end < len(document):
        yield document[end:]


def words(text: str) -> list[str]:
    """Lower-case words of letters a to z and digits: rouge-score's tokens without a stemmer."""
    return _WORD.findall(text.lower())


def sentence_scores(sentences: list[str]) -> list[float]:
    """ROUGE-1 F of each sentence against all the others together (PEGASUS, "Ind-Orig").

    With o words in common, i in the sentence and r in the rest, precision is o / i, recall o / r,
    and F = 2 o / (i + r), whose denominator is the document's length for every sentence. Counts
    decide the overlap, so that the whole costs one pass over the words.
    """
    counts = [collections.Counter(words(sentence)) for sentence in sentences]
    document = collections.Counter()
    for count in counts:
        document.update(count)
    total = max(document.total(), 1)
    return [
        2 * sum(min(n, document[word] - n) for word, n in count.items()) / total for count in counts
    ]


def select_sentences(sentences: list[str], settings: GapSettings, draw: random.Random) -> list[int]:
    """Indices of the gap sentences, in order; of equal scores, the earlier sentence's counts more.

    Fewer than all are selected, at least one.

    Args:
      sentences: two or more.
      settings: which ones, and how many.
      draw: the random numbers to use.
    """
    ratio = settings.ratio
    if settings.stochastic:
        ratio *= draw.uniform(_LEAST_PART, 1)
    count = max(int(len(sentences) * ratio), 1)
    if settings.selection == "lead":
        return list(range(count))
    if settings.selection == "random":
        scores = [draw.random() for _ in sentences]
    else:
        scores = sentence_scores(sentences)
        if settings.stochastic:
            scores = [score * draw.uniform(1 - _NOISE, 1 + _NOISE) for score in scores]
    best = sorted(range(len(sentences)), key=lambda i: -scores[i])
    return sorted(best[:count])


def document_hash(document: str, seed: int) -> int:
    """56 bits that depend on the document and the seed alone, the same in every process."""
    digest = hashlib.blake2b(document.encode(), digest_size=7, key=seed.to_bytes(8, "big"))
    return int.from_bytes(digest.digest(), "big")


def gap_example(document: str, settings: GapSettings) -> tuple[str, str] | None:
    """(document with its gap sentences masked, gap sentences joined by a space).

    Tabs become spaces; what looks like the mask in the document is written without its brackets.

    Returns:
      None for a document of fewer than two sentences, which has no rest to learn from.
    """
    draw = random.Random(document_hash(document, settings.seed))
    document = document.replace("\t", " ").replace("\0", "").replace(MASK, MASK.strip("<>"))
    sentences = _head(split_sentences(document, settings.language), settings.max_words)
    if len(sentences) < 2:
        return None
    gaps = select_sentences(sentences, settings, draw)
    target = " ".join(sentences[i].strip() for i in gaps)
    for i in gaps:
        if draw.random() >= settings.intact:
            sentence = sentences[i]
            before = sentence[: len(sentence) - len(sentence.lstrip())]
            sentences[i] = before + MASK + sentence[len(sentence.rstrip()) :]
    return "".join(sentences).strip(), target


def _head(sentences: list[str], max_words: int) -> list[str]:
    """The first sentences, as many as have up to `max_words` words."""
    used = 0
    for i, sentence in enumerate(sentences):
        used += len(sentence.split())
        if used > max_words:
            return sentences[:i]
    return sentences


def gap_examples(documents: list[str], settings: GapSettings) -> list[tuple[str, str]]:
    """`gap_example` of each document that has one."""
    examples = (gap_example(document, settings) for document in documents)
    return [example for example in examples if example is not None]

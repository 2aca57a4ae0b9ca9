"""Texts in, texts out, from a model directory."""

import keras
import numpy as np
from tqdm import tqdm

from tf_teaforn import model_dir as model_dirs
from tf_teaforn.config import SENTENCES_AT_A_TIME
from tf_teaforn.data.cache import TokenRows
from tf_teaforn.data.pipeline import decode_batches, score_batches
from tf_teaforn.data.tokenizer import NEWLINE_PIECE, add_eos
from tf_teaforn.data.tokenizers import load_tokenizer
from tf_teaforn.decoding import SearchConfig
from tf_teaforn.errors import UserError, check_backend

check_backend(keras.backend.backend())
if keras.backend.backend() == "jax":
    from tf_teaforn.jax_backend.inference import score_function, search_function
else:
    from tf_teaforn.tf_backend.inference import score_function, search_function


def search_config(decoding, **overrides):
    """The `SearchConfig` of a `DecodingConfig`, with differences by its own field names."""
    return SearchConfig(
        **{
            "beam_size": decoding.beam_size,
            "alpha": decoding.beam_alpha,
            "max_length": decoding.decode_length,
            **overrides,
        }
    )


class Translator:
    """Decodes and scores texts with a `Seq2Seq`.

    Args:
        seq2seq: the model.
        tokenizer: its `Tokenizer`.
        config: `SearchConfig`.
        max_source_length: longer sources are cut before end-of-sentence.
        max_target_length: the same for targets to score.

    Attributes:
        batch_size: how many texts are computed at a time; may be set. Results do not depend on it.
        cut_sources, cut_targets: how many were longer than that so far, in `decode` and `score`.
    """

    batch_size = SENTENCES_AT_A_TIME

    def __init__(self, seq2seq, tokenizer, config, max_source_length, max_target_length):
        self.seq2seq = seq2seq
        self.tokenizer = tokenizer
        self.config = config
        self.max_source_length = max_source_length
        self.max_target_length = max_target_length
        self.cut_sources = self.cut_targets = 0
        self._search = search_function(seq2seq, config)
        self._score = score_function(seq2seq)

    def __call__(self, texts, progress=False):
        """list of str -> list of str, the best hypothesis of each, in order; see `decode`."""
        return [hypotheses[0][0] for hypotheses in self.decode(texts, progress)]

    def decode(self, texts, progress=False):
        """N-best lists.

        Args:
            texts: list of str, where "<n>" is a newline. A blank one gives blank hypotheses.
            progress: whether to show a bar, if standard error is a terminal.

        Returns:
            For each text, in order, a list of `n_best` triples: text, natural-log probability
            (end-of-sentence included), penalised score. Where fewer ended, the rest have no text
            and a probability of -inf.

        Raises:
            UserError: one text is given, not a list.
        """
        (texts,) = _as_lists(texts)
        results = [[("", 0.0, 0.0)] * self.config.n_best for _ in texts]
        filled = [
            index for index, text in enumerate(texts) if text.replace(NEWLINE_PIECE, "\n").strip()
        ]
        rows = self._source_rows([texts[index] for index in filled])
        with tqdm(total=len(filled), unit=" sentences", disable=None if progress else True) as bar:
            for indices, source_ids in decode_batches(
                rows, max_length=self.max_source_length, batch_size=self.batch_size
            ):
                found = self._search(source_ids)
                outputs = self._texts(np.asarray(found.token_ids))
                scores, penalized = np.asarray(found.scores), np.asarray(found.penalized)
                for row, index in enumerate(indices):
                    results[filled[index]] = [
                        (outputs[row][rank], float(scores[row][rank]), float(penalized[row][rank]))
                        for rank in range(self.config.n_best)
                    ]
                bar.update(len(indices))
        return results

    def score(self, sources, targets):
        """Natural-log probabilities of targets, end-of-sentence included: float32 [B].

        Args:
            sources, targets: lists of B str, where "<n>" is a newline.

        Raises:
            UserError: one text is given, not a list, or the lists differ in length.
        """
        sources, targets = _as_lists(sources, targets)
        if len(sources) != len(targets):
            raise UserError(f"There are {len(sources)} sources and {len(targets)} targets.")
        scores = np.zeros(len(sources), np.float32)
        source_rows = self._source_rows(sources)
        target_rows, cut = _rows(self.tokenizer.targets, targets, self.max_target_length)
        self.cut_targets += cut
        for indices, source_ids, target_ids in score_batches(
            source_rows,
            target_rows,
            max_source_length=self.max_source_length,
            max_target_length=self.max_target_length,
            batch_size=self.batch_size,
        ):
            scores[indices] = self._score(source_ids, target_ids)
        return scores

    def count_tokens(self, targets):
        """Numbers of tokens that `score` sums over, end-of-sentence included: int64 [B]."""
        rows, _ = _rows(self.tokenizer.targets, targets, self.max_target_length)
        return np.asarray(rows.lengths)

    def _source_rows(self, texts):
        rows, cut = _rows(self.tokenizer, texts, self.max_source_length)
        self.cut_sources += cut
        return rows

    def _texts(self, ids_BxNxL):
        batch, n_best, length = ids_BxNxL.shape
        texts = self.tokenizer.targets.detokenize(ids_BxNxL.reshape(batch * n_best, length)).numpy()
        return [[t.decode() for t in row] for row in texts.reshape(batch, n_best)]


def _as_lists(*arguments):
    if any(isinstance(texts, str) for texts in arguments):
        raise UserError("A list of texts is needed, not one text.")
    # They are gone through more than once, and may be generators or files.
    return [list(texts) for texts in arguments]


def _rows(tokenizer, texts, max_length):
    """(`TokenRows` ended in end-of-sentence, how many texts had to be cut)."""
    # Not every vocabulary takes "<n>" for a newline.
    texts = [text.replace(NEWLINE_PIECE, "\n") for text in texts]
    tokens = tokenizer.tokenize(np.array(texts, dtype=object))
    cut = int(np.sum(tokens.row_lengths().numpy() >= max_length))
    ragged = add_eos(tokens, max_length)
    return TokenRows(ragged.flat_values.numpy(), ragged.row_splits.numpy()), cut


def load(model_dir, checkpoint="best", **search_overrides):
    """Opens a trained model for inference.

    Args:
        model_dir: what `bin/train` wrote.
        checkpoint: best, latest, <step> or average:<n>.
        **search_overrides: fields of `SearchConfig`, where they differ from the run's settings.

    Returns:
        `Translator`.

    Raises:
        UserError: no such folder or checkpoint.
    """
    config = model_dirs.read_config(model_dir)
    search = search_config(config.decoding, **search_overrides)
    tokenizer = load_tokenizer(model_dir)
    seq2seq, _ = model_dirs.load_seq2seq(model_dir, config, tokenizer, checkpoint)
    return Translator(
        seq2seq,
        tokenizer,
        search,
        config.data.max_source_length,
        config.data.max_target_length,
    )

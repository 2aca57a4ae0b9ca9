"""Search and scoring as compiled functions of token ids."""

import jax
import keras

from tf_teaforn.decoding import score, search


def search_function(seq2seq, config):
    """Returns a function: int32 [B, S] source ids -> `SearchResult`. Compiled once a shape."""
    return _compiled(
        seq2seq, lambda source_ids: search(seq2seq, {"encoder_token_ids": source_ids}, config)
    )


def score_function(seq2seq):
    """Returns a function: int32 [B, S], int32 [B, T] -> float32 [B], see `decoding.score`."""
    return _compiled(
        seq2seq,
        lambda source_ids, target_ids: score(
            seq2seq, {"encoder_token_ids": source_ids}, target_ids
        ),
    )


def _compiled(seq2seq, function):
    """`function`, compiled with the model's weights as arguments: they change while training."""

    @jax.jit
    def run(values, *ids):
        with keras.StatelessScope(state_mapping=zip(seq2seq.variables, values, strict=True)):
            return function(*ids)

    return lambda *ids: run([variable.value for variable in seq2seq.variables], *ids)

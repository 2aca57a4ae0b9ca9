"""Search and scoring as compiled functions of token ids."""

import tensorflow as tf

from tf_teaforn import decoding

# Their loops are Keras', not Python's. To have AutoGraph look at all that they call takes seconds.
search = tf.autograph.experimental.do_not_convert(decoding.search)
score = tf.autograph.experimental.do_not_convert(decoding.score)

_IDS = tf.TensorSpec([None, None], tf.int32)


def search_function(seq2seq, config):
    """Returns a function: int32 [B, S] source ids -> `SearchResult`. Compiled once."""

    @tf.function(input_signature=[_IDS])
    def run(source_ids):
        return search(seq2seq, {"encoder_token_ids": source_ids}, config)

    return run


def score_function(seq2seq):
    """Returns a function: int32 [B, S], int32 [B, T] -> float32 [B], see `decoding.score`."""

    @tf.function(input_signature=[_IDS, _IDS])
    def run(source_ids, target_ids):
        return score(seq2seq, {"encoder_token_ids": source_ids}, target_ids)

    return run

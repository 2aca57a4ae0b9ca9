"""Search and scoring as compiled functions of token ids."""

import contextlib

import keras
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
        with _off_tpu(seq2seq):
            return search(seq2seq, {"encoder_token_ids": source_ids}, config)

    return run


def score_function(seq2seq):
    """Returns a function: int32 [B, S], int32 [B, T] -> float32 [B], see `decoding.score`."""

    @tf.function(input_signature=[_IDS, _IDS])
    def run(source_ids, target_ids):
        with _off_tpu(seq2seq):
            return score(seq2seq, {"encoder_token_ids": source_ids}, target_ids)

    return run


@contextlib.contextmanager
def _off_tpu(seq2seq):
    """Under TPUStrategy, what is inside computes on the host, whose shapes may grow.

    Weights are read from the TPU where this begins: a search would copy them at every position.
    """
    if not _has_tpu():
        yield
        return
    with tf.device("CPU:0"):
        read = [(weight, tf.identity(weight.value)) for weight in seq2seq.weights]
        with keras.StatelessScope(read):
            yield


def _has_tpu():
    return bool(tf.config.list_logical_devices("TPU"))

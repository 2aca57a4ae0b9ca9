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
        with _weights_read_once(seq2seq):
            return search(seq2seq, {"encoder_token_ids": source_ids}, config)

    return run


def score_function(seq2seq):
    """Returns a function: int32 [B, S], int32 [B, T] -> float32 [B], see `decoding.score`."""

    @tf.function(input_signature=[_IDS, _IDS])
    def run(source_ids, target_ids):
        with _weights_read_once(seq2seq):
            return score(seq2seq, {"encoder_token_ids": source_ids}, target_ids)

    return run


@contextlib.contextmanager
def _weights_read_once(seq2seq):
    """Inside, the model computes with what its weights were where this began.

    A search is a loop that would read them at every position. Under TPUStrategy it runs on the
    host, as its shapes grow, and every reading of a weight is a copy from the TPU.
    """
    on_host = tf.config.list_logical_devices("TPU")
    with tf.device("CPU:0" if on_host else None):
        read = [(weight, tf.identity(weight.value)) for weight in seq2seq.weights]
        with keras.StatelessScope(read):
            yield

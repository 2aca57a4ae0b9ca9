"""A look at token ids outside of what accelerators compute."""

import tensorflow as tf


def checked(ids, vocabulary_size, name):
    """`ids`, of any shape; an `InvalidArgumentError` if one is outside of the vocabulary.

    Accelerators give the zero vector, or that of another subword, for such an id.
    """
    known = tf.reduce_all((ids >= 0) & (ids < vocabulary_size))
    message = f"{name}: an id is outside of the vocabulary, which has 0 to {vocabulary_size - 1}"
    with tf.control_dependencies([tf.debugging.Assert(known, [message])]):
        return tf.identity(ids)

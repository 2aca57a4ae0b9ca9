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


def dataset_with_checks(data, vocabulary_size):
    """A `tf.data` dataset that looks at its batches' ids on the host; anything else as it is."""
    if not isinstance(data, tf.data.Dataset):
        return data

    def check(inputs, *rest):
        inputs = {
            name: checked(ids, vocabulary_size, name) if name.endswith("_token_ids") else ids
            for name, ids in inputs.items()
        }
        if not rest:
            return inputs
        targets, *weights = rest
        return inputs, checked(targets, vocabulary_size, "targets"), *weights

    return data.map(check)

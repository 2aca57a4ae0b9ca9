"""Random numbers of the replicas of a strategy."""

import contextlib

import tensorflow as tf

# Seeds are cut to 32 bits, or taken modulo 2^31 - 2 in layers of Keras' own. Neither modulus has a
# factor in common with this, so that the replicas of a generator never share a seed.
_APART = 0x9E3779B1


@contextlib.contextmanager
def seeds_of_this_replica(model):
    """Inside, each replica draws numbers of its own from `model`'s seed generators.

    Keras keeps the same seed on all replicas, which would give all of them the same dropout masks.
    Here the replica's number is added to the seeds, and taken off again: what a checkpoint holds
    does not depend on it, and one replica draws what a single device does.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        yield
        return
    replica = tf.cast(context.replica_id_in_sync_group, tf.int64)
    offset = tf.stack([replica * _APART, 0])
    seeds = [
        variable.value
        for variable in model.non_trainable_variables
        if variable.name == "seed_generator_state"
    ]
    for seed in seeds:
        seed.assign_add(tf.cast(offset, seed.dtype))
    yield
    for seed in seeds:
        seed.assign_sub(tf.cast(offset, seed.dtype))

"""Losses and gradients that are not finite numbers: noticed inside the compiled step."""

import tensorflow as tf

from tf_teaforn.errors import NonfiniteSteps


class NonfiniteGuard:
    """Notes bad steps and, if asked to, leaves weights and optimizer as they were in them.

    Made under the scope of the strategy that runs the step.

    Args:
        stages: number of stages N.
        skip: whether a bad step is skipped on all replicas, rather than noted only.
    """

    def __init__(self, stages, skip):
        self._skip = skip
        # Every replica writes the same into its own copy.
        self._step, self._count, self._first = (
            tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(3)
        )
        self._bad = tf.Variable(tf.zeros([stages + 1]), trainable=False)

    def begin(self, step):
        """Says which step, from 1, this is; in each replica."""
        self._step.assign(step)

    def update(self, optimizer, sums, gradients, variables):
        """Applies the gradients of one replica, unless the step is to be skipped.

        Args:
            optimizer: Keras optimizer, built.
            sums: `LossSums` of this replica.
            gradients: this replica's, not summed yet; in the order of `variables`.
            variables: Keras variables.

        Returns:
            `sums`; all zero where the step was skipped, so that means are not spoiled.
        """
        finite = [tf.math.is_finite(tf.cast(stage, tf.float32)) for stage in sums.stages]
        # Squares that overflow spoil the moments of an optimizer, and the norm to clip by, as well.
        finite.append(tf.math.is_finite(tf.linalg.global_norm(gradients)))
        bad = tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, 1.0 - tf.cast(tf.stack(finite), tf.float32)
        )
        good = tf.reduce_sum(bad) == 0.0
        first = tf.logical_and(tf.logical_not(good), self._first == 0)
        self._bad.assign(tf.where(first, bad, self._bad))
        self._first.assign(tf.where(first, self._step, self._first))
        self._count.assign_add(tf.cast(tf.logical_not(good), tf.int64))
        if not self._skip:
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return sums
        _apply_if(good, optimizer, gradients, variables)
        return tf.nest.map_structure(lambda total: tf.where(good, total, 0.0), sums)

    def read(self):
        """Returns `NonfiniteSteps`; the next bad step will be a first one again."""
        first = int(self._first.numpy())
        bad = self._bad.numpy()
        names = [f"the loss of stage {stage}" for stage in range(len(bad) - 1)] + ["the gradient"]
        what = ", ".join(name for name, value in zip(names, bad, strict=True) if value)
        self._first.assign(0)
        return NonfiniteSteps(int(self._count.numpy()), first or None, what)

    def restore(self, count):
        """Sets the number of bad steps."""
        self._count.assign(count)


def _apply_if(condition, optimizer, gradients, variables):
    def apply(gradients):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def choose(condition, apply):
        tf.cond(condition, lambda: (apply(), True)[1], lambda: False)

    def across_replicas(strategy, condition, gradients):
        choose(
            strategy.experimental_local_results(condition)[0],
            lambda: strategy.extended.call_for_each_replica(apply, args=(gradients,)),
        )

    # A condition around what synchronises replicas has to stand outside of them, except where they
    # are synchronised by collective operations: Keras' LossScaleOptimizer has the same two cases.
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        choose(condition, lambda: apply(gradients))
    else:
        tf.distribute.get_replica_context().merge_call(across_replicas, args=(condition, gradients))

"""`train_step` under TensorFlow, inside any `tf.distribute` strategy."""

import tensorflow as tf

from tf_teaforn import objective
from tf_teaforn.accumulation import accumulate, batch_of, number_of_parts
from tf_teaforn.models.recompute import use_remat
from tf_teaforn.tf_backend.random import seeds_of_this_replica
from tf_teaforn.tf_backend.remat import remat

use_remat(remat)


class TrainStep:
    """Mixed into `TeaForN` under the TensorFlow backend."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        # A `NonfiniteGuard`, if anybody sets one.
        self.guard = None
        # What `compile(jit_compile="auto")` goes by. On the CPU TensorFlow's own kernels are
        # faster than XLA's, TPUStrategy compiles by itself, and under MirroredStrategy the step
        # has collectives, which XLA cannot compile.
        one_device = tf.distribute.get_strategy().num_replicas_in_sync == 1
        self.supports_jit = one_device and bool(tf.config.list_physical_devices("GPU"))

    def make_train_function(self, force=False):
        """Keras', after the optimizer has its variables.

        Made in the first trace they would make a second one necessary, and each a condition in it.
        """
        if not self.optimizer.built:
            with self.distribute_strategy.scope():
                self.optimizer.build(self.trainable_variables)
        return super().make_train_function(force)

    def train_step(self, data):
        """One update. The loss is divided by the number of target tokens of all replicas.

        With uneven lengths a mean over each replica, or over each part of a batch, would weigh
        tokens differently from one device.

        Args:
            data: (inputs, targets, weights), see `TeaForN.loss_sums`.

        Returns:
            The logs of `TeaForN.update_metrics`.
        """
        batch = batch_of(data)
        replica = tf.distribute.get_replica_context()
        tokens = replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(batch[2]))
        tokens = objective.divisor(tokens)
        variables = self.trainable_variables
        values = [variable.value for variable in variables]

        def step(part, state):
            with tf.GradientTape() as tape:
                sums = self.loss_sums(*part, training=True)
                loss = self.optimizer.scale_loss(sums.total / tokens)
            gradients = tape.gradient(
                loss, values, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
            return (sums, [tf.convert_to_tensor(gradient) for gradient in gradients]), state

        parts = number_of_parts(batch, self.micro_batch_tokens, replica.num_replicas_in_sync)
        zeros = (self.no_sums(), [tf.zeros_like(value) for value in values])
        with seeds_of_this_replica(self):
            (sums, gradients), _ = accumulate(step, batch, parts, zeros)
        if replica.num_replicas_in_sync > 1:
            _clip_sums(self.optimizer)
        # Keras sums the gradients over the replicas.
        if self.guard is None:
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        else:
            sums = self.guard.update(self.optimizer, sums, gradients, variables)
        return self.update_metrics(sums)

    def test_step(self, data):
        """The logs of one batch without dropout; arguments as `train_step`."""
        return self.update_metrics(self.loss_sums(*batch_of(data), training=False))


def _clip_sums(optimizer):
    """Makes an optimizer of Keras clip the sum of the replicas' gradients, as one device does.

    Keras clips each replica's gradient before it sums them. Its own method is replaced, not called
    beforehand: gradients that it has unscaled and accumulated are those to clip.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not (optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue):
        return

    def clip(gradients):
        replica = tf.distribute.get_replica_context()
        sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        clipped = type(optimizer)._clip_gradients(optimizer, sums)
        # Keras will sum these.
        return [gradient / replica.num_replicas_in_sync for gradient in clipped]

    optimizer._clip_gradients = clip

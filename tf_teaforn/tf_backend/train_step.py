"""`train_step` under TensorFlow, inside any `tf.distribute` strategy."""

import keras
import tensorflow as tf

from tf_teaforn.tf_backend.random import seeds_of_this_replica


class TrainStep:
    """Mixed into `TeaForN` under the TensorFlow backend."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        # A `NonfiniteGuard`, if anybody sets one.
        self.guard = None
        # What `compile(jit_compile="auto")` goes by. On the CPU TensorFlow's own kernels are
        # faster than XLA's, and strategies over several devices compile by themselves.
        one_device = tf.distribute.get_strategy().num_replicas_in_sync == 1
        self.supports_jit = one_device and bool(tf.config.list_physical_devices("GPU"))

    def train_step(self, data):
        """One update. The loss is divided by the number of target tokens of all replicas.

        With uneven lengths a mean over each replica would weigh tokens differently from one
        device.

        Args:
            data: (inputs, targets, weights), see `TeaForN.loss_sums`.

        Returns:
            The logs of `TeaForN.update_metrics`.
        """
        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(data)
        variables = self.trainable_variables
        with seeds_of_this_replica(self):
            with tf.GradientTape() as tape:
                sums = self.loss_sums(inputs, targets, weights, training=True)
                tokens = tf.distribute.get_replica_context().all_reduce(
                    tf.distribute.ReduceOp.SUM, sums.tokens
                )
                loss = self.optimizer.scale_loss(sums.total / tf.maximum(tokens, 1.0))
            gradients = tape.gradient(loss, [variable.value for variable in variables])
        # Keras sums the gradients over the replicas.
        if self.guard is None:
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        else:
            sums = self.guard.update(self.optimizer, sums, gradients, variables)
        return self.update_metrics(sums)

    def test_step(self, data):
        """The logs of one batch without dropout; arguments as `train_step`."""
        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(data)
        return self.update_metrics(self.loss_sums(inputs, targets, weights, training=False))

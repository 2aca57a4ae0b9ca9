"""`train_step` under TensorFlow, inside any `tf.distribute` strategy."""

import tensorflow as tf

from tf_teaforn.accumulation import accumulate, batch_of, number_of_parts
from tf_teaforn.models.recompute import use_remat
from tf_teaforn.tf_backend.ids import checked
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
        # faster than XLA's, and strategies over several devices compile by themselves.
        one_device = tf.distribute.get_strategy().num_replicas_in_sync == 1
        self.supports_jit = one_device and bool(tf.config.list_physical_devices("GPU"))

    def fit(self, x=None, *args, **kwargs):
        """Keras' own; a dataset whose ids are outside of the vocabulary is an error on any device.

        Raises:
            tf.errors.InvalidArgumentError: there is such an id.
        """
        size = self.seq2seq.vocabulary_size
        if "validation_data" in kwargs:
            kwargs["validation_data"] = _with_checks(kwargs["validation_data"], size)
        return super().fit(_with_checks(x, size), *args, **kwargs)

    def evaluate(self, x=None, *args, **kwargs):
        """Keras' own; as `fit`."""
        return super().evaluate(_with_checks(x, self.seq2seq.vocabulary_size), *args, **kwargs)

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
        variables = self.trainable_variables
        values = [variable.value for variable in variables]

        def step(part, state):
            with tf.GradientTape() as tape:
                sums = self.loss_sums(*part, training=True)
                loss = self.optimizer.scale_loss(sums.total / tf.maximum(tokens, 1.0))
            gradients = tape.gradient(
                loss, values, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
            return (sums, [tf.convert_to_tensor(gradient) for gradient in gradients]), state

        parts = number_of_parts(batch, self.micro_batch_tokens, replica.num_replicas_in_sync)
        zeros = (self.no_sums(), [tf.zeros_like(value) for value in values])
        with seeds_of_this_replica(self):
            (sums, gradients), _ = accumulate(step, batch, parts, zeros)
        # Keras sums the gradients over the replicas.
        if self.guard is None:
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        else:
            sums = self.guard.update(self.optimizer, sums, gradients, variables)
        return self.update_metrics(sums)

    def test_step(self, data):
        """The logs of one batch without dropout; arguments as `train_step`."""
        return self.update_metrics(self.loss_sums(*batch_of(data), training=False))


def _with_checks(data, vocabulary_size):
    """A dataset of batches that looks at their ids, on the host; anything else as it is."""
    if not isinstance(data, tf.data.Dataset):
        return data

    def check(inputs, targets, *weights):
        inputs = {
            name: checked(ids, vocabulary_size, name) if name.endswith("_token_ids") else ids
            for name, ids in inputs.items()
        }
        return inputs, checked(targets, vocabulary_size, "targets"), *weights

    return data.map(check)

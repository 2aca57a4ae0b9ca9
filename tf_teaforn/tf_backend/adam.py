"""Adam as one kernel of TensorFlow's for each variable."""

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable("tf_teaforn")
class Adam(keras.optimizers.Adam):
    """`keras.optimizers.Adam` by the same formula, with every number read and written once.

    Keras composes the update of a dozen operations, a tenth of the time of a step of a small model
    on a CPU. Gradients of single rows are left to Keras.
    """

    def update_step(self, gradient, variable, learning_rate):
        if isinstance(gradient, tf.IndexedSlices) or self.amsgrad:
            return super().update_step(gradient, variable, learning_rate)
        index, dtype = self._get_variable_index(variable), variable.dtype
        step = tf.cast(self.iterations + 1, dtype)
        beta_1, beta_2 = (tf.cast(beta, dtype) for beta in (self.beta_1, self.beta_2))
        moments = self._momentums[index].value, self._velocities[index].value
        weights, momentum, velocity = (value.handle for value in (variable, *moments))
        tf.raw_ops.ResourceApplyAdam(
            var=weights,
            m=momentum,
            v=velocity,
            beta1_power=tf.pow(beta_1, step),
            beta2_power=tf.pow(beta_2, step),
            lr=tf.cast(learning_rate, dtype),
            beta1=beta_1,
            beta2=beta_2,
            epsilon=tf.cast(self.epsilon, dtype),
            grad=tf.cast(gradient, dtype),
        )

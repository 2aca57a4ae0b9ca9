"""Gradients under the backend in use."""

import keras
import numpy as np
from keras import ops


def gradients_of(function, variables, *arguments):
    """Differentiates a scalar by Keras variables and by arrays.

    Args:
        function: takes `arguments`, returns (scalar, other values).
        variables: list of Keras variables that it reads.
        arguments: float arrays.

    Returns:
        (gradients by the variables, gradients by the arguments, other values): NumPy arrays.
    """
    arguments = [ops.convert_to_tensor(x) for x in arguments]
    values = [ops.convert_to_tensor(variable.value) for variable in variables]
    if keras.backend.backend() == "jax":
        import jax

        def stateless(values, arguments):
            with keras.StatelessScope(state_mapping=zip(variables, values, strict=True)):
                return function(*arguments)

        differentiate = jax.jit(jax.grad(stateless, argnums=(0, 1), has_aux=True))
        gradients, others = differentiate(values, arguments)
    else:
        import tensorflow as tf

        values = [variable.value for variable in variables]
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            scalar, others = function(*arguments)
        gradients = tape.gradient(scalar, (values, arguments))
    return keras.tree.map_structure(ops.convert_to_numpy, (*gradients, others))


def loss_and_gradients(model, inputs, targets, weights):
    """Of a `TeaForN` in training, summed over a batch, not averaged.

    Returns:
        (losses of the stages [N], {path: gradient of Σ λ^s L_s} for the trainable weights).
    """
    inputs = {name: ops.convert_to_tensor(ids) for name, ids in inputs.items()}
    targets, weights = ops.convert_to_tensor(targets), ops.convert_to_tensor(weights)

    def loss():
        sums = model.loss_sums(inputs, targets, weights, training=True)
        return sums.total, sums.stages

    variables = model.trainable_variables
    gradients, _, stages = gradients_of(loss, variables)
    paths = [variable.path for variable in variables]
    return np.array(stages), dict(zip(paths, gradients, strict=True))

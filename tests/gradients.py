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


def check_frequent_rows():
    """In mixed precision thousands of gradients of one row are summed as if in float32.

    Rows of token ids, of the best tokens of logits, of T5's distances and of BART's positions.
    """
    from tf_teaforn.models.embedding import TokenEmbedding
    from tf_teaforn.models.hub import BartEncoder, T5Encoder

    layer = {"hidden_dim": 8, "intermediate_dim": 8, "num_heads": 8, "dropout": 0.0}
    policy = {"dtype": "mixed_bfloat16"}
    embedding = TokenEmbedding(32, 8, scaled=False, **policy)
    bart = BartEncoder(num_layers=1, max_positions=4, **layer, **policy)
    t5 = T5Encoder(num_layers=1, head_dim=1, **layer, **policy)
    for part in (embedding, bart, t5):
        part.build(None)
    count = 50 * 50
    upstream = np.random.default_rng(0).normal(size=(count, 8)).astype("float32") + 0.5
    # What bfloat16 can hold, so that only the sums differ.
    upstream = ops.convert_to_numpy(ops.cast(ops.cast(upstream, "bfloat16"), "float32"))
    ids = np.full(count, 3, "int32")
    logits = np.zeros((count, 32), "float32")
    logits[:, 3] = 50

    attention = t5.hub_layers[0].self_attention
    positions = bart.position_embedding.position_embeddings
    distances = attention.relative_attention_bias

    def frequent_bias():
        # All of one bucket, of distances beyond the largest.
        far = attention.compute_bias(50, 50, -1000)[0]
        return ops.reshape(ops.transpose(far, (1, 2, 0)), (count, 8))

    # The layers that these are called in cast what they read.
    def inside(part, function):
        with keras.src.backend.AutocastScope(part.compute_dtype):
            return function()

    cases = (
        (embedding.embeddings, lambda: embedding(ids)),
        (embedding.embeddings, lambda: embedding.expectation(ops.convert_to_tensor(logits), 2)),
        (positions, lambda: inside(bart, lambda: ops.take(positions, ids, axis=0))),
        (distances, lambda: inside(t5, frequent_bias)),
    )
    for variable, function in cases:

        def loss(upstream, function=function):
            return ops.sum(ops.cast(function(), "float32") * upstream), 0

        ((gradient,), _, _) = gradients_of(loss, [variable], upstream)
        (row,) = np.flatnonzero(np.abs(gradient).sum(axis=1) > 1)
        np.testing.assert_allclose(gradient[row], upstream.sum(axis=0), rtol=1e-3)


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


def check_discounts_that_change():
    """λ may depend on the step, in steps of training and validation that are compiled once."""
    from tf_teaforn import TeaForN, testing

    class Annealed(TeaForN):
        def stage_discounts(self):
            started = ops.cast(self.optimizer.iterations > 1, "float32")
            return [1.0, 0.5 * started]

    model = Annealed(testing.tiny_model(), n=2)
    model.compile(optimizer=keras.optimizers.SGD(0.1))
    inputs, targets, weights = testing.padded_batch(testing.random_pairs(4, 4, 5))
    data = {"sample_weight": weights, "validation_data": (inputs, targets, weights)}
    logs = model.fit(inputs, targets, **data, batch_size=4, epochs=3, verbose=0)
    logs = {name: np.array(values) for name, values in logs.history.items()}
    for prefix, discounts in (("", [0, 0, 0.5]), ("val_", [0, 0.5, 0.5])):
        expected = logs[f"{prefix}loss_0"] + np.array(discounts) * logs[f"{prefix}loss_1"]
        np.testing.assert_allclose(logs[f"{prefix}loss"], expected, rtol=1e-6)

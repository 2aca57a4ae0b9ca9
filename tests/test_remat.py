"""Computing again under TensorFlow: the same gradients, and no compiler that sees through it."""

import numpy as np
import tensorflow as tf

from tf_teaforn.tf_backend.remat import remat

SPEC = tf.TensorSpec([8])


def compiled_gradient(wrap):
    """(gradient as a compiled function, number of sines in its program)."""
    weight = tf.Variable(1.5)

    @tf.function(jit_compile=True, input_signature=[SPEC])
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            (y,) = wrap(lambda x: (tf.sin(tf.sin(x) * weight),))(x)
            total = tf.reduce_sum(y**2)
        return tape.gradient(total, [x, weight])

    text = run.experimental_get_compiler_ir(SPEC)(stage="optimized_hlo")
    return run, text.count(" sine(")


def test_xla_computes_again():
    x = np.linspace(-1, 1, 8, dtype="float32")
    again, sines = compiled_gradient(remat)
    kept, expected_sines = compiled_gradient(lambda function: function)
    assert sines >= expected_sines + 2
    for gradient, expected in zip(again(x), kept(x), strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)

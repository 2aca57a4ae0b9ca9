"""Computing again in the backward pass, under XLA too."""

import tensorflow as tf


def remat(function):
    """`function`, of which the backward pass keeps the arguments only.

    The second computation depends on the gradient that arrives, in a way that XLA cannot simplify.
    `tf.recompute_grad` means to, by comparing a truth value with itself, which XLA may know to be
    true: compiling for a TPU it then kept what the first computation had made.

    Args:
        function: of floating tensors; returns a tuple of tensors, the first of them floating.
    """

    @tf.custom_gradient
    def call(*arguments):
        results = function(*arguments)

        def gradient(*upstream, variables=None):
            first = tf.reshape(upstream[0], [-1])[:1]
            zero = tf.reduce_any(first != first)
            late = [x + tf.cast(zero, x.dtype) for x in arguments]
            with tf.GradientTape() as tape:
                tape.watch(late)
                again = function(*late)
            sources = [late, list(variables or ())]
            gradients = tape.gradient(
                again,
                sources,
                output_gradients=upstream,
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            return gradients if variables is not None else gradients[0]

        return results, gradient

    return call

"""TensorFlow's devices where another framework computes."""

import tensorflow as tf


def hide_gpus():
    """Keeps TensorFlow off all GPUs; call it before its first operation."""
    tf.config.set_visible_devices([], "GPU")

"""Dropout from seeds of 32 bits, at the same rate in every precision."""

import keras
from keras import ops


class ShortSeeds(keras.random.SeedGenerator):
    """Draws the seeds of another generator, those of 64 bits cut to 32.

    Under TensorFlow Keras takes remainders to make them so short. A TPU has no integers of 64 bits,
    and what its compiler puts in the place of a remainder makes it slow, a thousand operations for
    each mask.

    Args:
        generator: whose state is advanced.
    """

    def __init__(self, generator):
        # Without a state of its own, which `super().__init__` would make.
        self.generator = generator

    def next(self, ordered=True):
        """The next seed, two numbers."""
        seed = self.generator.next(ordered)
        long = keras.backend.standardize_dtype(seed.dtype) == "int64"
        return ops.cast(seed, "int32") if long else seed


class Dropout(keras.layers.Dropout):
    """Keras' layer with `ShortSeeds`, and with the given rate in every precision."""

    def call(self, inputs, training=False):
        """`inputs`, of any shape; in training with a share `rate` of zeros, the rest scaled up."""
        if not training or not self.rate:
            return inputs
        seed = ShortSeeds(self.seed_generator)
        # In bfloat16 TensorFlow would draw numbers of seven bits, and round rate and scale to them.
        exact = ops.cast(inputs, "float32")
        dropped = keras.random.dropout(exact, self.rate, noise_shape=self.noise_shape, seed=seed)
        return ops.cast(dropped, inputs.dtype)


def shorten_seeds(layer):
    """Makes all of Keras' own dropouts in a layer, which is built, those of this module."""
    for part in layer._flatten_layers():
        if type(part) is keras.layers.Dropout:
            # They differ in what they do alone, not in what they hold.
            part.__class__ = Dropout

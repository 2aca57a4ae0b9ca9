"""TensorFlow's own checkpoints, `<prefix>.index` and `<prefix>.data-*`, by variable name."""

import tensorflow as tf

from tf_teaforn.errors import UserError


def open_checkpoint(prefix):
    """Opens a checkpoint.

    Args:
        prefix: path without `.index`.

    Returns:
        ({name: shape}, function from a name to its value, a NumPy array).

    Raises:
        UserError: it is damaged.
    """
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        shapes = {name: tuple(shape) for name, shape in reader.get_variable_to_shape_map().items()}
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{prefix} is no TensorFlow checkpoint that can be read: {error}"
        ) from error

    def read(name):
        try:
            return reader.get_tensor(name)
        except (tf.errors.OpError, RuntimeError) as error:
            raise UserError(f"{prefix}: {name} cannot be read: {error}") from error

    return shapes, read

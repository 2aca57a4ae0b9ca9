"""Points for TensorBoard."""

import tensorflow as tf


class ScalarWriter:
    """Scalars for TensorBoard.

    Args:
        directory: where event files are.
        last_step: points after this step, which a run left behind that is now continued, are
            withdrawn.
    """

    def __init__(self, directory, last_step=None):
        if last_step is not None:
            _withdraw_after(str(directory), last_step)
        self._writer = tf.summary.create_file_writer(str(directory))

    def write(self, step, values):
        """Adds {name: float} at a step."""
        with self._writer.as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(name, value)
        self._writer.flush()


def _withdraw_after(directory, step):
    """Writes the event upon which TensorBoard forgets points at later steps.

    It is SessionLog.START: `EventAccumulator._CheckForRestartAndMaybePurge` in
    tensorboard/backend/event_processing/event_accumulator.py.
    """
    log = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
    # The writer of TensorFlow 1, the only one that writes such an event, wants a graph.
    with tf.Graph().as_default():
        writer = tf.compat.v1.summary.FileWriter(directory)
        writer.add_session_log(log, global_step=step + 1)
        writer.close()

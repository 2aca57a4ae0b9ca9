"""Points for TensorBoard."""

import tensorflow as tf
from etils import epath


class ScalarWriter:
    """Scalars for TensorBoard.

    Args:
        directory: where event files are.
        last_step: points after this step, which a run left behind that is now continued, are
            withdrawn.
    """

    def __init__(self, directory, last_step):
        _withdraw_after(epath.Path(directory), last_step)
        self._writer = tf.summary.create_file_writer(str(directory))

    def write(self, step, values):
        """Adds {name: float} at a step."""
        with self._writer.as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(name, value)
        self._writer.flush()


def _withdraw_after(directory, step):
    """Rewrites the event files without points at later steps, and without torn ends.

    TensorBoard's own way, an event SessionLog.START, leaves points behind in some of its readers.
    """
    for path in directory.glob("events.out.tfevents.*"):
        kept, dropped = [], False
        try:
            for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
                late = tf.compat.v1.Event.FromString(record).step > step
                dropped = dropped or late
                if not late:
                    kept.append(record)
        except tf.errors.DataLossError:
            # The process was killed while it wrote.
            dropped = True
        if dropped:
            temporary = directory / "rewritten.tmp"
            with tf.io.TFRecordWriter(str(temporary)) as writer:
                for record in kept:
                    writer.write(record)
            temporary.replace(path)

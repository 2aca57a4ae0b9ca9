"""Points for TensorBoard."""

import tensorflow as tf
from etils import epath

from tf_teaforn.paths import is_remote, matching


class ScalarWriter:
    """Scalars for TensorBoard.

    Args:
        directory: where event files are.
        last_step: points after this step, which a run left behind that is now continued, are
            withdrawn.
    """

    def __init__(self, directory, last_step):
        _withdraw_after(epath.Path(directory), last_step)
        # An object store takes the whole file again at every flush.
        self._at_once = not is_remote(directory)
        # Microseconds have to fit into 32 bits.
        rarely = {} if self._at_once else {"max_queue": 10**6, "flush_millis": 2 * 10**6}
        self._writer = tf.summary.create_file_writer(str(directory), **rarely)

    def write(self, step, values):
        """Adds {name: float} at a step; on a remote file system they are there after `flush`."""
        with self._writer.as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(name, value)
        if self._at_once:
            self.flush()

    def flush(self):
        """Writes what was added."""
        self._writer.flush()


def _withdraw_after(directory, step):
    """Rewrites the event files without points at later steps, and without torn ends.

    TensorBoard's own way, an event SessionLog.START, leaves points behind in some of its readers.
    """
    for path in matching(directory, "events.out.tfevents.*"):
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

"""The tasks that come with tf_teaforn; importing this package registers them.

To add one: write a module beside these that opens with its command and the score to expect, calls
`tf_teaforn.task.register_task` with a `Task` around a source (`tf_teaforn.data.sources`), and
import it below. A task of your own outside this package is registered the same way by
`--module_import=your.module`. Importing a task module must not touch data or import tensorflow:
sources open their data when a split is asked for, and `preprocess` functions import it inside.
"""

from tasks import cnn_dailymail, demo, gigaword, gsg, text, wmt

__all__ = ["cnn_dailymail", "demo", "gigaword", "gsg", "text", "wmt"]

"""What all commands share."""

import errno
import io

import numpy as np
import pytest
import tensorflow as tf

import tf_teaforn
from tf_teaforn.cli import app
from tf_teaforn.errors import UserError


def test_the_error_of_a_layer_is_told_as_it_was_raised():
    """Keras and AutoGraph put it at the end of pages of their own."""
    sizes = {"num_layers": 1, "hidden_dim": 4}
    model = tf_teaforn.TeaForN(tf_teaforn.build_model("rnn_base", 10, **sizes), n=1)
    ids = np.ones((2, 3), "int32")
    names = ("encoder", "decoder")
    packed = {f"{name}_{kind}": ids for name in names for kind in ("segment_ids", "positions")}
    packed |= {f"{name}_token_ids": ids for name in names}
    with pytest.raises(UserError) as caught:
        tf.function(lambda: model.hidden_states(packed))()
    assert str(app._innermost(caught.value)) == (
        "--batching=pack: a recurrent model would carry its state from one sentence of a row "
        "into the next. Write --batching=bucket."
    )
    assert app._innermost(ValueError("as it is")).args == ("as it is",)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "/x: Permission denied."),
        (OSError(errno.EFBIG, "File too large"), "output: File too large."),
        (
            OSError(errno.ENOTCONN, "Transport endpoint is not connected"),
            "reading or writing: Transport endpoint is not connected.",
        ),
        (
            TimeoutError(errno.ETIMEDOUT, "Connection timed out"),
            "reading or writing: Connection timed out.",
        ),
        (
            FileNotFoundError("The specified path gs://b/x was not found."),
            "The specified path gs://b/x was not found.",
        ),
        (OSError("without a file"), None),
        (io.UnsupportedOperation("not writable"), None),
        (TimeoutError(), None),
    ],
)
def test_errors_of_files_and_disks(error, line):
    """None is a mistake of ours, which keeps its traceback."""
    assert app._os_error_line(error) == line

"""What all commands share."""

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

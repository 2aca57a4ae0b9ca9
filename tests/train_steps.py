"""Train steps of a small model whose matrix products are counted, by either backend."""

from unittest import mock

import keras
import numpy as np

from tf_teaforn import TeaForN, build_model, objective
from tf_teaforn.flops import training_flops

SIZES = {"num_layers": 1, "hidden_dim": 16, "intermediate_dim": 32}
SHAPE = {"batch_size": 4, "source_length": 12, "target_length": 8, "vocabulary_size": 400}
SETTINGS = {
    "3": {"n": 3},
    "2-unshared": {"n": 2, "shared": False},
    # Two rows at a time.
    "3-parts": {"n": 3, "micro_batch_tokens": 24},
}


def model_and_batch(**settings):
    """A compiled `TeaForN` and (inputs, targets, weights)."""
    seq2seq = build_model("transformer_tiny", SHAPE["vocabulary_size"], num_heads=2, **SIZES)
    model = TeaForN(seq2seq, **settings)
    model.compile(optimizer=keras.optimizers.SGD())
    model.optimizer.build(model.trainable_variables)
    source, target = (np.zeros([SHAPE["batch_size"], length], "int32") for length in (12, 8))
    weights = np.ones(target.shape, "float32")
    return model, ({"encoder_token_ids": source, "decoder_token_ids": target}, target, weights)


def loss_in_turns():
    """Context in which the loss is a loop over 16 positions at a time."""
    return mock.patch.object(objective, "_CHUNK_LOGITS", 16 * SHAPE["vocabulary_size"])


def flops(name, **shape):
    """By the closed formula."""
    settings = {key: SETTINGS[name][key] for key in ("n", "shared") if key in SETTINGS[name]}
    return training_flops(**SIZES, **{**SHAPE, **shape}, **settings)

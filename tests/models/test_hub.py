"""T5 in mixed precision: what its norms compute."""

import keras
import numpy as np
import pytest
from keras import ops

from tf_teaforn.models.hub import T5Embedding, build_t5

SIZES = {
    "num_layers": 2,
    "hidden_dim": 64,
    "intermediate_dim": 64,
    "num_heads": 2,
    "head_dim": 32,
    "dropout": 0.0,
}


DTYPES = ("float32", "mixed_bfloat16")
IDS = np.random.default_rng(0).integers(2, 50, [8, 12]).astype("int32")
INPUTS = {"encoder_token_ids": IDS, "decoder_token_ids": IDS}


@pytest.fixture(scope="module")
def models():
    """{dtype policy: a T5 with the same weights}."""
    keras.utils.set_random_seed(1)
    models = {dtype: build_t5(50, SIZES, SIZES, dtype=dtype) for dtype in DTYPES}
    for model in models.values():
        model(INPUTS)
    weights = models["float32"].get_weights()
    generator = np.random.default_rng(2)
    weights = [w * generator.uniform(0.5, 1.5, w.shape).astype("float32") for w in weights]
    for model in models.values():
        model.set_weights(weights)
    return models


def test_the_table_starts_around_0():
    """A normal distribution cut at two deviations of 1 has one of .88."""
    table = T5Embedding(1000, 64)
    table.build()
    values = ops.convert_to_numpy(table.embeddings)
    np.testing.assert_allclose([values.mean(), values.std()], [0, 0.8796], atol=0.02)


def norms(model):
    """{path of its weight: norm}."""
    found = {}
    for stack in (model.encoder, model.decoder):
        for layer in stack._flatten_layers():
            if "norm" in layer.name:
                found[layer.weight.path] = layer
    return found


def test_norms_are_those_of_float32(models):
    x = np.random.default_rng(3).normal(0, 3, [4, 64]).astype("float32")
    x = ops.convert_to_numpy(ops.cast(ops.cast(x, "bfloat16"), "float32"))
    expected = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6)
    mixed = norms(models["mixed_bfloat16"])
    assert len(mixed) == 2 * (2 + 3) + 2
    assert list(mixed) == list(norms(models["float32"]))
    for path, norm in mixed.items():
        assert path.endswith("norm/weight")
        actual = ops.convert_to_numpy(ops.cast(norm(ops.cast(x, "bfloat16")), "float32"))
        weight = ops.convert_to_numpy(norm.weight)
        np.testing.assert_allclose(actual, expected * weight, rtol=1e-5, err_msg=path)


def test_the_rest_stays_in_bfloat16(models):
    model = models["mixed_bfloat16"]
    x = ops.ones([1, 3, 64], "bfloat16")
    mask = ops.ones([1, 3], "bool")
    memory = model.encoder(x, mask)
    assert keras.backend.standardize_dtype(memory.dtype) == "bfloat16"
    out = model.decoder(x, model.decoder.prepare(memory, mask))
    assert keras.backend.standardize_dtype(out.dtype) == "bfloat16"


def logits(model):
    return ops.convert_to_numpy(ops.cast(model(INPUTS), "float32"))


def test_logits_are_nearer_to_float32_than_with_norms_in_bfloat16(models):
    exact, mixed = (logits(models[dtype]) for dtype in DTYPES)
    coarse = build_t5(50, SIZES, SIZES, dtype="mixed_bfloat16")
    coarse(INPUTS)
    coarse.set_weights(models["float32"].get_weights())
    for norm in norms(coarse).values():
        norm.dtype_policy = "mixed_bfloat16"
    # About 0.007 and 0.009 of the logits' size; by seed .78 to .87 of each other.
    errors = [np.linalg.norm(other - exact) for other in (mixed, logits(coarse))]
    assert errors[0] < 0.95 * errors[1]


def test_variables_are_those_of_float32(models):
    paths = [
        [(v.path, tuple(v.shape), v.dtype) for v in models[dtype].variables] for dtype in DTYPES
    ]
    assert paths[0] == paths[1]

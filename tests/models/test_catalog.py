"""Models by name: sizes, overrides, errors."""

import keras
import numpy as np
import pytest
from keras import ops

import tf_teaforn
from tf_teaforn import testing
from tf_teaforn.config import settings
from tf_teaforn.errors import UserError
from tf_teaforn.models.catalog import build_model, model_names


def weight_count(vocabulary_size, num_layers, width, inner):
    """Of a pre-norm Transformer without attention biases, tied embeddings."""
    attention, feed_forward = 4 * width**2, 2 * width * inner + width + inner
    encoder = attention + feed_forward + 2 * 2 * width
    decoder = 2 * attention + feed_forward + 3 * 2 * width
    return vocabulary_size * width + num_layers * (encoder + decoder) + 2 * 2 * width


@pytest.mark.parametrize(
    ("name", "num_layers", "width", "inner", "heads", "dropout"),
    [
        ("transformer_tiny", 2, 128, 512, 4, 0.1),
        ("transformer_multi30k", 4, 128, 256, 4, 0.3),
        ("transformer_small", 3, 256, 1024, 4, 0.1),
    ],
)
def test_sizes(name, num_layers, width, inner, heads, dropout):
    model = build_model(name, vocabulary_size=50)
    assert model.count_params() == weight_count(50, num_layers, width, inner)
    assert model.decoder.settings["num_heads"] == heads
    assert model.decoder.settings["dropout"] == dropout
    assert model.vocabulary_size == 50


@pytest.mark.parametrize(
    ("name", "width", "inner", "heads", "dropout"),
    [
        ("transformer_base", 512, 2048, 8, 0.1),
        ("transformer_big", 1024, 4096, 16, 0.3),
        ("transformer_big_enfr", 1024, 4096, 16, 0.1),
    ],
)
def test_sizes_of_the_paper(name, width, inner, heads, dropout):
    """Table 2 of the paper; one layer stands for six."""
    model = build_model(name, vocabulary_size=50, num_layers=1)
    assert model.count_params() == weight_count(50, 1, width, inner)
    for part in (model.encoder, model.decoder):
        assert part.settings["num_heads"] == heads
        assert part.settings["dropout"] == dropout


def test_pegasus_large():
    """Zhang et al. 2020, section 6.1: 568M parameters with V = 96103."""
    assert weight_count(96103, 16, 1024, 4096) == 568_503_296
    model = build_model("pegasus_large", vocabulary_size=7, num_layers=1)
    assert model.count_params() == weight_count(7, 1, 1024, 4096)
    tiny = {"hidden_dim": 4, "intermediate_dim": 4, "num_heads": 1}
    assert build_model("pegasus_large", 7, **tiny).count_params() == weight_count(7, 16, 4, 4)
    for part in (model.encoder, model.decoder):
        assert part.settings["num_heads"] == 16
        assert part.settings["position_signal"] == "tensor2tensor"


def test_paper_models_have_six_layers():
    tiny = {"hidden_dim": 4, "intermediate_dim": 4, "num_heads": 1}
    for name in ("transformer_base", "transformer_big", "transformer_big_enfr"):
        model = build_model(name, vocabulary_size=7, **tiny)
        assert model.count_params() == weight_count(7, 6, 4, 4)


def test_overrides_reach_encoder_and_decoder():
    model = testing.tiny_model(norm="post", attention_bias=True, position_signal="interleaved")
    for part in (model.encoder, model.decoder):
        assert part.settings["norm"] == "post" and part.settings["attention_bias"]
        assert part.settings["position_signal"] == "interleaved"
    assert not testing.tiny_model(scaled_embedding=False).embedding.scaled


def test_precision():
    model = testing.tiny_model(dtype="mixed_bfloat16")
    layers = (model.embedding, model.encoder, model.decoder)
    assert {layer.compute_dtype for layer in layers} == {"bfloat16"}
    assert {layer.variable_dtype for layer in layers} == {"float32"}


def test_all_weights_exist_at_once_and_logits_come_out():
    model = testing.tiny_model()
    inputs, targets, _ = testing.padded_batch(testing.random_pairs(3))
    count = len(model.weights)
    logits = ops.convert_to_numpy(model(inputs))
    assert logits.shape == (*targets.shape, testing.TINY_VOCABULARY_SIZE)
    assert len(model.weights) == count


def test_errors_name_what_exists():
    with pytest.raises(UserError, match="'transformer_huge'.*transformer_tiny, transformer_small"):
        build_model("transformer_huge", vocabulary_size=7)
    with pytest.raises(UserError, match="transformer_tiny cannot be built.*num_heads 3"):
        build_model("transformer_tiny", vocabulary_size=7, num_heads=3)
    with pytest.raises(UserError, match="transformer_tiny cannot be built: hidden_dim 15 is odd"):
        build_model("transformer_tiny", vocabulary_size=7, num_heads=3, hidden_dim=15)
    with pytest.raises(UserError, match="cannot be built: position_signal 'learned' is none of ha"):
        build_model("transformer_tiny", vocabulary_size=7, position_signal="learned")
    with pytest.raises(UserError, match="widht"):
        build_model("transformer_tiny", vocabulary_size=7, widht=3)


def test_package_exports():
    assert tf_teaforn.build_model is build_model
    assert tf_teaforn.model_names() == model_names()
    with pytest.raises(AttributeError, match="no attribute 'typo'"):
        _ = tf_teaforn.typo
    for name in ("Decoder", "Seq2Seq", "TeaForN", "build_model", "model_names"):
        assert getattr(tf_teaforn, name).__name__ == name


def test_a_seed_makes_the_same_model():
    tables = []
    for seed in (1, 1, 2):
        keras.utils.set_random_seed(seed)
        tables.append(build_model("transformer_tiny", vocabulary_size=9).get_weights())
    assert all(np.array_equal(a, b) for a, b in zip(tables[0], tables[1], strict=True))
    assert not np.array_equal(tables[0][0], tables[2][0])


def test_help_names_the_models():
    (field,) = (field for field in settings() if field.name == "model")
    # tests/nano_model.py may have added its own.
    names = {*model_names()} - {"transformer_nano", "transformer_thin"}
    assert {name for name in names if f"{name}," not in field.metadata["help"]} == set()

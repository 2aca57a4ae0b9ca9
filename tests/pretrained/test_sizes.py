"""The families at their published sizes have as many parameters as published."""

import math
from concurrent.futures import ThreadPoolExecutor

import keras
import pytest

from tf_teaforn.models.catalog import build_model
from tf_teaforn.models.hub import build_bart, build_t5
from tf_teaforn.pretrained.transformer import build_transformer


def sizes(num_layers, hidden_dim, intermediate_dim, num_heads, **more):
    return {
        "num_layers": num_layers,
        "hidden_dim": hidden_dim,
        "intermediate_dim": intermediate_dim,
        "num_heads": num_heads,
        **more,
    }


LARGE = sizes(16, 1024, 4096, 16, attention_bias=True)
BART = sizes(12, 1024, 4096, 16, max_positions=1024)
T5 = sizes(6, 512, 2048, 8, head_dim=64)
OPUS = sizes(6, 512, 2048, 8, attention_bias=True, norm="post")


def build_ours(vocabulary_size, settings):
    return build_transformer(vocabulary_size, settings, settings, dtype=None, scaled=True)


# What `num_parameters` of transformers says, less what is none of our weights: two tables of 1,024
# or 512 sinusoids; two rows in front of each of BART's tables of positions. The first: 568M in
# Zhang et al. 2020, section 6.1, attention without biases.
@pytest.mark.parametrize(
    ("build", "count"),
    [
        (lambda: build_model("pegasus_large", 96103), 568_503_296),
        (lambda: build_ours(96103, LARGE), 570_797_056 - 2 * 1024 * 1024),
        (lambda: build_ours(58101, OPUS), 74_410_496 - 2 * 512 * 512),
        (lambda: build_bart(50265, BART, BART), 406_291_456 - 2 * 2 * 1024),
        (lambda: build_t5(32128, T5, T5), 60_506_624),
    ],
    ids=["pegasus_large", "google/pegasus-large", "opus-mt-en-de", "bart-large", "t5-small"],
)
def test_numbers_of_parameters(build, count):
    def shapes():
        with keras.StatelessScope(initialize_variables=False):
            return [weight.shape for weight in build().weights]

    # In this scope weights have a shape and no values. Keras keeps a list, of each thread, of those
    # that it means to initialise later.
    with ThreadPoolExecutor(1) as pool:
        assert sum(map(math.prod, pool.submit(shapes).result())) == count

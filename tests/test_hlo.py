"""Products counted in HLO: loops by hand, the train step by its closed formula."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import train_steps
from tf_teaforn import TeaForN, testing
from tf_teaforn.hlo import matmul_flops, seeds
from tf_teaforn.models.hub import build_bart, build_t5
from tf_teaforn.tf_backend.hlo import train_step_hlo

jax = pytest.importorskip("jax")


def jax_text(function, *arguments):
    return jax.jit(function).lower(*arguments).as_text("hlo")


def tensorflow_text(function, *specs):
    compiled = tf.function(function, input_signature=specs, jit_compile=True)
    return compiled.experimental_get_compiler_ir(*specs)(stage="hlo")


def test_products():
    def function(x, y):
        return jax.numpy.einsum("bij,bkj->bik", x, y) @ np.ones((7, 2))

    text = jax_text(function, np.ones((3, 4, 5)), np.ones((3, 7, 5)))
    assert matmul_flops(text) == 2 * (3 * 4 * 7 * 5 + 3 * 4 * 2 * 7)


def test_loops_count_their_turns():
    def layer(x, weights):
        x = jax.lax.fori_loop(0, 3, lambda i, x: x @ x.T @ x, x)
        return jax.numpy.tanh(x @ weights), None

    def loss(x, weights):
        return jax.lax.scan(jax.checkpoint(layer), x, weights)[0].sum()

    x, weights = np.ones((4, 8)), np.ones((5, 8, 8))
    forward = 5 * 2 * (3 * 2 * 4 * 4 * 8 + 4 * 8 * 8)
    assert matmul_flops(jax_text(loss, x, weights)) == forward
    # Forwards, forwards again, and two products for each backwards.
    assert matmul_flops(jax_text(jax.grad(loss, (0, 1)), x, weights)) == 4 * forward


def test_loops_of_tensorflow():
    def function(x):
        return tf.while_loop(lambda i, x: i < 10, lambda i, x: (i + 3, x @ x), (tf.constant(0), x))[
            1
        ]

    text = tensorflow_text(function, tf.TensorSpec([6, 6]))
    assert matmul_flops(text) == 4 * 2 * 6**3


def test_gradients_of_loops_of_tensorflow():
    """The loop back has as many turns as the first one counted."""

    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            turn = (lambda i, _: i < 5, lambda i, x: (i + 1, tf.sin(x @ x)))
            _, y = tf.while_loop(*turn, (tf.constant(0), x), maximum_iterations=5)
        return tape.gradient(y, x)

    text = tensorflow_text(function, tf.TensorSpec([6, 6]))
    assert matmul_flops(text) == (5 + 2 * 5) * 2 * 6**3


def test_a_loop_without_end_is_no_number():
    def function(x):
        return jax.lax.while_loop(lambda x: x.sum() < 1.0, lambda x: x @ x, x)

    with pytest.raises(ValueError, match="number of turns"):
        matmul_flops(jax_text(function, np.ones((2, 2))))


@pytest.mark.parametrize("name", train_steps.SETTINGS)
def test_a_train_step_takes_what_the_formula_says(name):
    model, batch = train_steps.model_and_batch(**train_steps.SETTINGS[name])
    with train_steps.loss_in_turns():
        module = train_step_hlo(model, batch)
    from jaxlib import _hlo

    counted = matmul_flops(_hlo.XlaComputation(module).as_hlo_text())
    assert counted == pytest.approx(train_steps.flops(name), rel=0.02)


def test_seeds_of_random_bits():
    def function(first, second):
        draw = tf.random.stateless_uniform
        return draw([4], second + 1), draw([4], first)

    pair = tf.TensorSpec([2], tf.int32)
    text = tensorflow_text(function, pair, pair)
    found = [re.search(rf"[ %]{re.escape(name)} = (.*)", text)[1] for name in seeds(text).values()]
    assert len(set(found)) == 2
    assert sum(" add(" in line for line in found) == 1


_SIZES = {"num_layers": 1, "hidden_dim": 4, "intermediate_dim": 6, "num_heads": 2, "dropout": 0.1}
_BART = {**_SIZES, "max_positions": 16}
_T5 = {**_SIZES, "head_dim": 2}
_SEQ2SEQ = {
    "transformer": lambda: testing.tiny_model(dropout=0.1),
    "bart": lambda: build_bart(testing.TINY_VOCABULARY_SIZE, _BART, _BART),
    "t5": lambda: build_t5(testing.TINY_VOCABULARY_SIZE, _T5, _T5),
}


@pytest.mark.parametrize("name", _SEQ2SEQ)
def test_seeds_of_a_train_step_are_short(name):
    """For a TPU a remainder of 64-bit numbers is a thousand operations, and slow to compile."""
    model = TeaForN(_SEQ2SEQ[name](), n=2, word_drop=0.1)
    model.compile(optimizer=keras.optimizers.SGD())
    batch = testing.padded_batch(testing.random_pairs(8, 4, 5))
    from jaxlib import _hlo

    text = _hlo.XlaComputation(train_step_hlo(model, batch)).as_hlo_text()
    found = set(seeds(text).values())
    assert len(found) > 5
    assert all(re.search(rf"[ %]{re.escape(seed)} = s32", text) for seed in found)
    assert not re.search(r"= s64\S* remainder\(", text)


def test_bits_without_a_seed():
    text = jax_text(lambda state: jax.lax.rng_bit_generator(state, (5,)), np.zeros(4, "uint32"))
    with pytest.raises(ValueError, match="is made of 0 seeds"):
        seeds(text)

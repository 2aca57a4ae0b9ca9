"""Position signals against one-number-at-a-time loops and published values."""

import numpy as np
import pytest
from keras import ops

from tests import numpy_transformer
from tf_teaforn.models.position import POSITION_SIGNALS, position_signal


@pytest.mark.parametrize("layout", POSITION_SIGNALS)
def test_signal_is_the_formula(layout):
    positions = np.array([0, 1, 2, 7, 100, 511])
    signal = position_signal(positions, 16, layout)
    expected = numpy_transformer.position_signal(positions, 16, layout)
    # float32 angles: 511 has a relative error of 6e-8.
    np.testing.assert_allclose(signal, expected, atol=5e-5)


def test_signal_has_the_shape_of_the_positions():
    positions = np.array([[0, 1, 2], [0, 0, 1]], "int32")
    signal = ops.convert_to_numpy(position_signal(positions, 8))
    assert signal.shape == (2, 3, 8)
    np.testing.assert_array_equal(signal[1, 2], signal[0, 1])
    assert position_signal(ops.convert_to_tensor(3), 8).shape == (8,)


def test_layouts_in_numbers():
    # Width 4, position 1: frequencies 1 and 1/100; with divisor D/2 - 1: 1 and 1/10000.
    sines, cosines = np.sin([1.0, 0.01, 1e-4]), np.cos([1.0, 0.01, 1e-4])
    expected = {
        "half_split": [sines[0], sines[1], cosines[0], cosines[1]],
        "interleaved": [sines[0], cosines[0], sines[1], cosines[1]],
        "tensor2tensor": [sines[0], sines[2], cosines[0], cosines[2]],
        "none": [0.0] * 4,
    }
    for layout, values in expected.items():
        np.testing.assert_allclose(position_signal(1, 4, layout), values, rtol=1e-6)


def test_the_narrowest_signal():
    # One frequency, 1, whatever the divisor.
    for layout in ("half_split", "tensor2tensor"):
        found = position_signal(3, 2, layout)
        np.testing.assert_allclose(found, [np.sin(3), np.cos(3)], rtol=1e-5)


def test_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="'learned' is none of half_split"):
        position_signal(np.arange(2), 4, "learned")
    with pytest.raises(ValueError, match="hidden_dim 5 is odd"):
        position_signal(np.arange(2), 5)

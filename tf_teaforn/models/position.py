"""Sinusoidal position signals (Vaswani et al. 2017, section 3.5) in the layouts in use."""

from keras import ops

POSITION_SIGNALS = ("half_split", "interleaved", "tensor2tensor", "none")


def position_signal(positions, width, layout="half_split"):
    """Sines and cosines of the positions.

    Args:
        positions: int32 [...].
        width: D, even.
        layout: "half_split": all sines, then all cosines, frequency 10000^(-i / (D/2)), as
            Marian has it; "tensor2tensor": the same with divisor D/2 - 1, as Tensor2Tensor and
            Google's PEGASUS have it; "interleaved": sine and cosine in turn, as in the paper of
            Vaswani et al.; "none": zeros.

    Returns:
        float32 [..., D].

    Raises:
        ValueError: unknown layout, or an odd width.
    """
    check_position_signal(width, layout)
    half = width // 2
    divisor = max(half - 1, 1) if layout == "tensor2tensor" else half
    frequencies = ops.power(10000.0, -ops.arange(half, dtype="float32") / divisor)
    angles = ops.cast(positions, "float32")[..., None] * frequencies
    sines, cosines = ops.sin(angles), ops.cos(angles)
    if layout == "interleaved":
        pairs = ops.stack([sines, cosines], axis=-1)
        return ops.reshape(pairs, tuple(ops.shape(pairs)[:-2]) + (width,))
    signal = ops.concatenate([sines, cosines], axis=-1)
    return ops.zeros_like(signal) if layout == "none" else signal


def check_position_signal(width, layout):
    """Raises ValueError where `position_signal` would, for who is built before its first call."""
    if layout not in POSITION_SIGNALS:
        raise ValueError(f"position_signal {layout!r} is none of {', '.join(POSITION_SIGNALS)}.")
    if width % 2:
        raise ValueError(f"hidden_dim {width} is odd; sines and cosines share it.")

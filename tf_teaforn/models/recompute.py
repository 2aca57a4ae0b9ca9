"""Activations that are computed again in the backward pass instead of kept (Chen et al. 2016)."""

import keras
from keras import ops

# What makes a function keep its arguments only; a backend may have a better one than Keras.
_remat = keras.remat


def use_remat(remat):
    """Sets what takes the place of `keras.remat`.

    Args:
        remat: `remat(function)`, of a function of floating tensors that returns a tuple.
    """
    global _remat
    _remat = remat


def recompute(layers, function, *arguments):
    """function(*arguments), of which the backward pass keeps the arguments only.

    The second computation draws the same random numbers as the first, and both are those that the
    function draws when called directly.

    Args:
        layers: those that `function` calls: all whose weights and random generators it uses.
        function: returns one tensor.
        *arguments: nested structures of tensors. Floating ones that a gradient is to reach must be
            here, not in a closure.
    """
    weights = {id(variable): variable for layer in layers for variable in layer.weights}
    others = {id(variable): variable for layer in layers for variable in layer.variables}
    states = [variable for key, variable in others.items() if key not in weights]
    # TensorFlow finds the weights by itself; under JAX they are values of the scope around.
    known = weights.values() if keras.backend.backend() == "jax" else ()
    known = [(variable, variable.value) for variable in known]
    seeds = [state.value * 1 for state in states]

    leaves = keras.tree.flatten(arguments)
    floating = [i for i, leaf in enumerate(leaves) if keras.backend.is_float_dtype(leaf.dtype)]

    def run(*floats):
        values = dict(zip(floating, floats, strict=True))
        rebuilt = [values.get(i, leaf) for i, leaf in enumerate(leaves)]
        # Zero, but the compiler cannot know: a draw that depends on the seeds alone would be
        # merged with that of the first computation, and kept.
        first = ops.reshape(floats[0], (-1,))[:1]
        zero = ops.any(first != first)
        mapping = [
            (state, seed + ops.cast(zero, seed.dtype))
            for state, seed in zip(states, seeds, strict=True)
        ]
        with keras.StatelessScope(state_mapping=[*known, *mapping]) as scope:
            result = function(*keras.tree.pack_sequence_as(arguments, rebuilt))
        return result, *(scope.get_current_value(state) for state in states)

    result, *drawn = _remat(run)(*(leaves[i] for i in floating))
    for state, value in zip(states, drawn, strict=True):
        state.assign(value)
    return result

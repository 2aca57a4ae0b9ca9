"""Memory that a traced function takes, from the sizes of its tensors and when they are used."""

import tensorflow as tf

# What hands on the memory of its first input.
_VIEWS = ("Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "EnsureShape")
# What others count: inputs, variables.
_FREE = ("Placeholder", "ReadVariableOp")
_FUNCTIONS = ("f", "body", "cond", "then_branch", "else_branch")


def peak_bytes(graph):
    """The most bytes that tensors take at a time, if operations run one by one in their order.

    Inputs and variables are left out, and so are tensors whose shape is unknown. A compiler that
    fuses operations needs less, several operations at a time need more.

    Args:
        graph: `tf.Graph` of a concrete function, with static shapes.
    """
    operations = graph.get_operations()
    owners, last_use = {}, {}
    for place, operation in enumerate(operations):
        for tensor in operation.inputs:
            last_use[owners[id(tensor)]] = place
        for tensor in operation.outputs:
            view = operation.type in _VIEWS
            owners[id(tensor)] = owners[id(operation.inputs[0])] if view else id(tensor)
            last_use.setdefault(owners[id(tensor)], place)
    for tensor in getattr(graph, "outputs", ()):
        last_use[owners[id(tensor)]] = len(operations)
    live = peak = 0
    ends = {}
    for place, operation in enumerate(operations):
        if operation.type not in _VIEWS + _FREE:
            for tensor in operation.outputs:
                size = _bytes(tensor)
                live += size
                ends.setdefault(last_use[id(tensor)], []).append(size)
        inside = max((peak_bytes(inner) for inner in _functions(graph, operation)), default=0)
        peak = max(peak, live + inside)
        live -= sum(ends.pop(place, ()))
    return peak


def _functions(graph, operation):
    """Graphs of the functions that an operation calls."""
    for name in _FUNCTIONS:
        if name in operation.node_def.attr and operation.node_def.attr[name].HasField("func"):
            yield graph._get_function(operation.node_def.attr[name].func.name).graph


def _bytes(tensor):
    elements = tensor.shape.num_elements()
    if elements is None or tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return elements * tensor.dtype.size

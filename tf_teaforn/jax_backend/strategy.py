"""Devices under JAX and the compiled step over them."""

import contextlib

import jax
import keras
import numpy as np

from tf_teaforn.errors import LostWorkerError, NonfiniteSteps, OutOfMemoryError, UserError

STRATEGIES = ("auto", "one", "mirrored", "tpu")
AXES = ("batch", "model")


def make_strategy(name="auto", mesh=None):
    """A `Strategy`.

    Args:
        name: "one" device; "mirrored" and "tpu": the batch split over all of them; "auto": as
            "mirrored" where there are accelerators, else one device.
        mesh: such as "batch:4,model:2": how many parts the batch and the model are split into;
            `name` is left at "auto" then. Without it the model is on every device.

    Raises:
        UserError: unknown name, no TPU, a mesh of other devices than there are, or several
            processes.
    """
    if name not in STRATEGIES:
        raise UserError(f"--strategy={name}: under JAX write one of {', '.join(STRATEGIES)}.")
    if jax.process_count() > 1:
        raise UserError(
            f"KERAS_BACKEND=jax runs in one process, and JAX found {jax.process_count()}: take the "
            "devices of one machine. --strategy=multi_worker is for TensorFlow."
        )
    devices = jax.devices()
    if name == "tpu" and devices[0].platform != "tpu":
        raise UserError(
            "--strategy=tpu: JAX found no TPU. Run on a TPU VM with jax[tpu] installed, or write "
            "--strategy=one."
        )
    if mesh is not None:
        if name != "auto":
            raise UserError(f"--mesh={mesh} says what runs where: leave out --strategy={name}.")
        sizes = _mesh_sizes(mesh, len(devices))
    elif name == "one" or (name == "auto" and devices[0].platform == "cpu"):
        sizes = (1, 1)
    else:
        sizes = (len(devices), 1)
    return Strategy(*sizes)


def _mesh_sizes(mesh, available):
    """(parts of the batch, parts of the model)."""
    sizes = {}
    for part in mesh.split(","):
        axis, _, size = part.partition(":")
        if axis not in AXES or axis in sizes or not size.isdecimal() or int(size) < 1:
            raise UserError(
                f"--mesh={mesh}: write axis:parts with the axes batch and model, each once, such "
                "as batch:4,model:2."
            )
        sizes[axis] = int(size)
    batch, model = (sizes.get(axis, 1) for axis in AXES)
    if batch * model != available:
        raise UserError(f"--mesh={mesh} is for {batch * model} devices; there are {available}.")
    return batch, model


def peak_memory():
    """{"peak_device_bytes": the most that any local device held}; {} where JAX does not say."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if "peak_bytes_in_use" in stat]
    return {"peak_device_bytes": max(peaks)} if peaks else {}


def device_memory():
    """Bytes of the first local device; None where JAX does not say."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


class Strategy:
    """A mesh of devices: what `tf.distribute.Strategy` is under TensorFlow.

    Args:
        batch, model: parts that the batch and the model are split into.
    """

    def __init__(self, batch, model):
        device_mesh = keras.distribution.DeviceMesh(
            (batch, model), AXES, [f"{d.platform}:{d.id}" for d in jax.devices()[: batch * model]]
        )
        self.distribution = _ModelParallel(
            layout_map=keras.distribution.LayoutMap(device_mesh),
            batch_dim_name="batch",
            # Every process reads the same batches.
            auto_shard_dataset=False,
        )
        self.num_replicas_in_sync = batch

    def scope(self):
        """Context in which variables are made."""
        return self.distribution.scope()


# Axis of a Transformer's weights that is split, as in Mesh TensorFlow's and T5's layout: heads,
# feed-forward units and subwords. What is not named is on every device.
_SPLIT_AXES = {
    "query/kernel": 1,
    "key/kernel": 1,
    "value/kernel": 1,
    "query/bias": 0,
    "key/bias": 0,
    "value/bias": 0,
    "output/kernel": 0,
    "inner/kernel": 1,
    "inner/bias": 0,
    "outer/kernel": 0,
    "embedding/embeddings": 0,
    # BART of KerasHub, besides.
    "attention_output/kernel": 0,
    "feedforward_intermediate_dense/kernel": 1,
    "feedforward_intermediate_dense/bias": 0,
    "feedforward_output_dense/kernel": 0,
    # T5 of KerasHub, besides; its last layers of attention and feed-forward have one name.
    "query_projector/kernel": 1,
    "key_projector/kernel": 1,
    "value_projector/kernel": 1,
    "input_projector/kernel": 1,
    "gate_projector/kernel": 1,
    "output_projector/kernel": 0,
    "embedding/reverse_embeddings": 1,
}


class _ModelParallel(keras.distribution.ModelParallel):
    """Splits each weight along the axis that the table above has for the end of its path."""

    def get_variable_layout(self, variable):
        own = getattr(variable, "_layout", None)
        if own is not None:
            return own
        axes = [None] * len(variable.shape)
        axis = _SPLIT_AXES.get("/".join(variable.path.split("/")[-2:]))
        parts = self.device_mesh.shape[1]
        if axis is not None and parts > 1:
            # A vocabulary of any size: its vectors can be split instead.
            if variable.path.endswith("embeddings") and variable.shape[axis] % parts:
                axis = 1 - axis
            if variable.shape[axis] % parts:
                raise UserError(
                    f"--mesh=…,model:{parts} does not divide {variable.path}, which has the shape "
                    f"{tuple(variable.shape)}. Write a divisor of {variable.shape[axis]}."
                )
            axes[axis] = "model"
        return keras.distribution.TensorLayout(axes, self.device_mesh)


class StepRunner:
    """Runs a model's `train_step` and `test_step` on all devices of a strategy.

    Args:
        strategy: the one under whose scope `model` was built and compiled.
        model: a compiled `TeaForN`.
        skip_nonfinite: whether steps after which a weight or the optimizer's state is not finite
            change nothing.

    Attributes:
        on_tpu: whether every shape of batch is compiled for a TPU.
    """

    def __init__(self, strategy, model, skip_nonfinite=False):
        self.strategy = strategy
        self.model = model
        self.on_tpu = jax.default_backend() == "tpu"
        if not model.optimizer.built:
            with strategy.scope():
                model.optimizer.build(model.trainable_variables)
        for variable in sum(training_variables(model), []):
            # Keras leaves the first value of a small variable outside of the mesh; the second step
            # would be compiled anew for values on it.
            layout = strategy.distribution.get_variable_layout(variable).backend_layout
            variable.assign(jax.device_put(variable.value, layout))
        shardings = jax.tree.map(lambda x: x.sharding, _values(training_variables(model)))
        distribution = strategy.distribution
        train_step = guarded(model.train_step, skip_nonfinite)
        self._train_step = compiled_step(distributed(train_step, distribution), shardings)
        # Keeps its arguments and returns metrics alone: validation may be left at any moment.
        self._test_step = jax.jit(
            distributed(lambda state, data: model.test_step(state, data)[1][-1], distribution),
            out_shardings=shardings[-1],
        )
        self.guard = NonfiniteGuard()

    def iterator(self, dataset):
        """What `train` reads: `dataset((0, 1))`, an endless dataset, split over the devices.

        Rows must be a multiple of the batch's parts.
        """
        return self._distribute(dataset((0, 1)))

    def _distribute(self, dataset):
        return map(self.put, dataset.as_numpy_iterator())

    def put(self, batch):
        """A batch of arrays, on the devices."""

        def put(array):
            layout = self.strategy.distribution.get_data_layout(array.shape)
            return jax.device_put(array, layout.backend_layout)

        return jax.tree.map(put, batch)

    def train(self, iterator, first_step, steps=1):
        """`steps` updates from the next batches; `first_step` is the number of the first, from 1.

        Raises:
            LostWorkerError: the device is gone.
            OutOfMemoryError: the step does not fit.
        """
        variables = training_variables(self.model)
        for step in range(first_step, first_step + steps):
            with _readable_errors():
                finite, values = self._train_step(_values(variables), next(iterator))
                _assign(sum(variables, []), sum(values, []))
                self.guard.add(step, finite)

    def nonfinite_steps(self):
        """`NonfiniteSteps` since the last call; waits for the steps that are under way.

        Raises:
            LostWorkerError: the device is gone.
            OutOfMemoryError: one of them did not fit.
        """
        with _readable_errors():
            return self.guard.read()

    def temporary_bytes(self, rows, source_length, target_length):
        """What XLA plans for gradients and activations of `train_step` on each device.

        Args:
            rows: of each part of the batch.
            source_length, target_length: in subwords.
        """
        source, target = (
            np.ones((rows * self.strategy.num_replicas_in_sync, length), np.int32)
            for length in (source_length, target_length)
        )
        inputs = {"encoder_token_ids": source, "decoder_token_ids": target}
        batch = self.put((inputs, target, target.astype(np.float32)))
        state = _values(training_variables(self.model))
        return self._train_step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes

    def test(self, dataset):
        """Runs over a finite dataset; returns the logs over all of it, as floats."""
        self.model.reset_metrics()
        for batch in self._distribute(dataset):
            with _readable_errors():
                data = batch, self.model.optimizer_values()
                values = self._test_step(_values(testing_variables(self.model)), data)
            _assign(self.model.metrics_variables, values)
        return self.read_logs()

    def read_logs(self):
        """Means since the last call, as floats; starts new ones."""
        with _readable_errors():
            logs = {metric.name: float(metric.result()) for metric in self.model.metrics}
        self.model.reset_metrics()
        return logs


@contextlib.contextmanager
def _readable_errors():
    # Steps run behind the program, which may hear of their end when it asks for results.
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        line = str(error).partition("\n")[0]
        if "RESOURCE_EXHAUSTED" in str(error):
            raise OutOfMemoryError(line) from error
        if line.startswith(("UNAVAILABLE", "ABORTED")):
            raise LostWorkerError.device(line) from error
        raise


def _assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


class NonfiniteGuard:
    """Notes steps after which a weight or the optimizer's state is not finite."""

    def __init__(self):
        self._steps = []
        self._count = 0

    def add(self, step, finite):
        """Adds a step; `finite` is a scalar on the device.

        Waits for the last step but two: the host is not to run further ahead, so that a signal ends
        the run soon.
        """
        self._steps.append((step, finite))
        if len(self._steps) > 2:
            jax.block_until_ready(self._steps[-3][1])

    def read(self):
        """Returns `NonfiniteSteps`; the next bad step will be a first one again."""
        bad = [step for step, finite in self._steps if not finite]
        self._steps = []
        self._count += len(bad)
        return NonfiniteSteps(self._count, bad[0] if bad else None, "the loss or a gradient")

    def restore(self, count):
        """Sets the number of bad steps."""
        self._count = count


class Workers:
    """The processes of one run: this one.

    Attributes:
        several: whether there is more than one.
        chief: whether this is the one that writes the run's files.
    """

    several = False
    chief = True

    def __init__(self, strategy):
        del strategy

    def sum(self, value):
        """The sum of a float over all workers."""
        return float(value)

    def wait(self):
        """Returns once all workers have called it."""


def guarded(step, skip):
    """`step`, a `train_step`, that returns whether all it has changed is finite, and the new state.

    That is weights and optimizer: of a gradient whose square overflows the weights do not tell.

    Args:
        skip: whether the state stays as it was where they are not.
    """

    def run(state, batch):
        _, new_state = step(state, batch)
        changed = jax.tree.leaves((new_state[0], new_state[2]))
        finite = jax.numpy.stack([jax.numpy.isfinite(value).all() for value in changed]).all()
        if skip:
            new_state = jax.tree.map(
                lambda new, old: jax.numpy.where(finite, new, old), new_state, state
            )
        return finite, new_state

    return run


def distributed(step, distribution):
    """`step`, which knows the distribution while it is traced: over how many devices batches are.

    Args:
        distribution: a `keras.distribution.Distribution`.
    """

    def run(state, batch):
        with distribution.scope():
            return step(state, batch)

    return run


def training_variables(model):
    """The state of `train_step`: trainable, non-trainable, the optimizer's, the metrics'."""
    return (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )


def testing_variables(model):
    """The state of `test_step`."""
    return model.trainable_variables, model.non_trainable_variables, model.metrics_variables


def _values(variables):
    return tuple([variable.value for variable in part] for part in variables)


def compiled_step(step, shardings):
    """`step` compiled; it takes over the memory of its state, which keeps its place on the devices.

    Args:
        step: function of (state, batch) that returns (a result, new state).
        shardings: of the state's arrays, in its structure.
    """
    return jax.jit(step, donate_argnums=0, out_shardings=(None, shardings))

"""Distribution strategies and the compiled step over them."""

import tensorflow as tf

from tf_teaforn.errors import UserError

STRATEGIES = ("auto", "one", "mirrored", "tpu")


def make_strategy(name="auto", tpu="local"):
    """A `tf.distribute.Strategy`.

    Args:
        name: "one" device; "mirrored" over all local accelerators; "tpu"; "auto": TPU where
            there is one, else mirrored over several GPUs, else one device.
        tpu: "local" or the TPU's name.

    Raises:
        UserError: unknown name, or no TPU.
    """
    if name not in STRATEGIES:
        raise UserError(f"--strategy={name}: write one of {', '.join(STRATEGIES)}.")
    if name == "tpu" or (name == "auto" and tf.config.list_physical_devices("TPU")):
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(tpu)
        except (ValueError, tf.errors.OpError) as error:
            raise UserError(
                f"--strategy=tpu --tpu={tpu}: no TPU found ({error}). Run on a TPU VM with "
                "tensorflow-tpu installed, or write --strategy=one."
            ) from error
        return tf.distribute.TPUStrategy(resolver)
    if name == "mirrored" or (name == "auto" and len(tf.config.list_logical_devices("GPU")) > 1):
        return tf.distribute.MirroredStrategy()
    return tf.distribute.get_strategy()


def peak_memory():
    """{"peak_device_bytes": the most that any local GPU held}; {} where there is none."""
    peaks = [
        tf.config.experimental.get_memory_info(f"GPU:{index}")["peak"]
        for index, _ in enumerate(tf.config.list_logical_devices("GPU"))
    ]
    return {"peak_device_bytes": max(peaks)} if peaks else {}


class StepRunner:
    """Runs a model's `train_step` and `test_step` on all replicas of a strategy.

    This is a loop of its own because Keras' `fit` cannot run under every strategy.

    Args:
        strategy: the one under whose scope `model` was built and compiled.
        model: a compiled `TeaForN`.
    """

    def __init__(self, strategy, model):
        self.strategy = strategy
        self.model = model
        self._steps = {}
        if not model.optimizer.built:
            # A traced step cannot create variables.
            with strategy.scope():
                model.optimizer.build(model.trainable_variables)

    def distribute(self, dataset):
        """Splits every batch over the replicas. Rows must be a multiple of their number."""
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return self.strategy.experimental_distribute_dataset(dataset.with_options(options))

    def step(self, name, element_spec):
        """The compiled `train_step` or `test_step` for batches of that spec."""
        if name not in self._steps:
            step = getattr(self.model, name)

            def run(*batch):
                self.strategy.run(step, args=(batch,))

            # One trace for all shapes.
            self._steps[name] = tf.function(run, input_signature=element_spec)
        return self._steps[name]

    def train(self, iterator):
        """One update from the next batch."""
        self.step("train_step", iterator.element_spec)(*next(iterator))

    def test(self, dataset):
        """Runs over a finite dataset; returns the logs over all of it, as floats."""
        self.model.reset_metrics()
        dataset = self.distribute(dataset)
        step = self.step("test_step", dataset.element_spec)
        for batch in dataset:
            step(*batch)
        return self.read_logs()

    def read_logs(self):
        """Means since the last call, as floats; starts new ones."""
        logs = {metric.name: float(metric.result()) for metric in self.model.metrics}
        self.model.reset_metrics()
        return logs


class ScalarWriter:
    """Scalars for TensorBoard."""

    def __init__(self, directory):
        self._writer = tf.summary.create_file_writer(str(directory))

    def write(self, step, values):
        """Adds {name: float} at a step."""
        with self._writer.as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(name, value)
        self._writer.flush()

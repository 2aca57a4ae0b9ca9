"""The compiled step over a strategy's replicas."""

import contextlib

import tensorflow as tf

from tf_teaforn.errors import LostWorkerError, OutOfMemoryError, UserError
from tf_teaforn.tf_backend.memory import peak_bytes
from tf_teaforn.tf_backend.nonfinite import NonfiniteGuard


class StepRunner:
    """Runs a model's `train_step` and `test_step` on all replicas of a strategy.

    This is a loop of its own because Keras' `fit` cannot run under every strategy.

    Args:
        strategy: the one under whose scope `model` was built and compiled.
        model: a compiled `TeaForN`.
        skip_nonfinite: whether steps with a loss or gradient that is not finite change nothing.

    Attributes:
        on_tpu: whether every shape of batch is compiled for a TPU.
    """

    def __init__(self, strategy, model, skip_nonfinite=False):
        self.strategy = strategy
        self.model = model
        self.workers = Workers(strategy)
        self.on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
        self._steps = {}
        with strategy.scope():
            self.guard = NonfiniteGuard(model.n, skip_nonfinite)
            if not model.optimizer.built:
                # A traced step cannot create variables.
                model.optimizer.build(model.trainable_variables)
        model.guard = self.guard

    def iterator(self, dataset):
        """What `train` reads.

        Args:
            dataset: `dataset((index, count))` returns the endless dataset of the batches' rows of
                the worker `index` of `count`. Rows must be a multiple of the number of replicas.
        """

        def rows(context):
            count = context.num_input_pipelines
            local = context.num_replicas_in_sync // count
            return _split(dataset((context.input_pipeline_id, count)), 0, local, local)

        return iter(self.strategy.distribute_datasets_from_function(rows))

    def _distribute(self, dataset):
        """Splits every batch of a finite dataset over the replicas."""

        def rows(context):
            replicas = context.num_replicas_in_sync
            local = replicas // context.num_input_pipelines
            share = _split(dataset, context.input_pipeline_id * local, local, replicas)
            return share.apply(tf.data.experimental.assert_cardinality(len(dataset) * local))

        return self.strategy.distribute_datasets_from_function(rows)

    def train(self, iterator, first_step, steps=1):
        """`steps` updates from the next batches, in one call of one compiled function.

        Args:
            iterator: of `iterator`.
            first_step: number of the first update, from 1.
            steps: number of updates.

        Raises:
            UserError: several steps at once of batches without a static shape on a TPU.
            LostWorkerError: another worker, or the device, is gone.
            OutOfMemoryError: the step does not fit.
        """
        with self.workers.readable_errors():
            first_step = tf.constant(first_step, tf.int64)
            if self._one_trace(iterator.element_spec):
                self._train_loop()(iterator, first_step, tf.constant(steps, tf.int64))
            elif steps == 1:
                self._train_once()(first_step, *next(iterator))
            else:
                raise UserError(
                    f"--steps_per_execution={steps}: on a TPU it takes batches of one shape. Add "
                    "--batching=fixed or --batching=pack, or write --steps_per_execution=1."
                )

    def _one_trace(self, element_spec):
        """Whether a trace without static shapes will do; a TPU takes static ones only."""
        shapes = [
            spec.shape
            for part in tf.nest.flatten(element_spec)
            for spec in getattr(part, "_value_specs", [part])
        ]
        return not self.on_tpu or all(shape.is_fully_defined() for shape in shapes)

    def nonfinite_steps(self):
        """`NonfiniteSteps` since the last call; waits for the steps that are under way.

        Raises:
            LostWorkerError: another worker, or the device, is gone.
            OutOfMemoryError: one of them did not fit.
        """
        with self.workers.readable_errors():
            return self.guard.read()

    def _train_loop(self):
        if "loop" not in self._steps:
            train_step = self._numbered_step()

            @tf.function
            def run(iterator, first_step, steps):
                for i in tf.range(steps):
                    self.strategy.run(train_step, args=(first_step + i, next(iterator)))

            self._steps["loop"] = run
        return self._steps["loop"]

    def _train_once(self):
        if "once" not in self._steps:
            train_step = self._numbered_step()

            @tf.function
            def run(number, *batch):
                self.strategy.run(train_step, args=(number, batch))

            self._steps["once"] = run
        return self._steps["once"]

    def _numbered_step(self):
        """Each replica's train step, of the step's number and a batch."""
        train_step = self._compiled("train_step")

        def run(number, batch):
            # Here every device writes its own copy; from outside, the host would write all.
            self.guard.begin(number)
            return train_step(batch)

        return run

    def step(self, name, element_spec=None):
        """The compiled `train_step` or `test_step`; without `element_spec` with a trace a shape."""
        if name not in self._steps:
            step = self._compiled(name)

            def run(*batch):
                self.strategy.run(step, args=(batch,))

            self._steps[name] = tf.function(run, input_signature=element_spec)
        return self._steps[name]

    def _compiled(self, name):
        # It has no loops or conditions for AutoGraph, whose look at all that it calls takes long.
        step = tf.autograph.experimental.do_not_convert(getattr(self.model, name))
        # TPUStrategy compiles by itself.
        return tf.function(step, jit_compile=True) if self.model.jit_compile else step

    def temporary_bytes(self, rows, source_length, target_length):
        """An estimate of gradients and activations of `train_step` on each device: `peak_bytes`.

        Args:
            rows: of each replica.
            source_length, target_length: in subwords.
        """
        source, target = (
            tf.TensorSpec([rows, length], tf.int32) for length in (source_length, target_length)
        )
        inputs = {"encoder_token_ids": source, "decoder_token_ids": target}
        weights = tf.TensorSpec(target.shape, tf.float32)
        step = self.step("train_step").get_concrete_function(inputs, target, weights)
        return peak_bytes(step.graph) // self.workers.local

    def test(self, dataset):
        """Runs over a dataset of known length; returns the logs over all of it, as floats."""
        self.model.reset_metrics()
        dataset = self._distribute(dataset)
        one_trace = self._one_trace(dataset.element_spec)
        with self.workers.readable_errors():
            step = self.step("test_step", dataset.element_spec if one_trace else None)
            for batch in dataset:
                step(*batch)
            return self.read_logs()

    def read_logs(self):
        """Means since the last call, as floats; starts new ones."""
        with self.workers.readable_errors():
            logs = {metric.name: float(metric.result()) for metric in self.model.metrics}
            self.model.reset_metrics()
        return logs


class Workers:
    """The processes of one run.

    Args:
        strategy: theirs.

    Attributes:
        local: number of replicas of this one.
        several: whether there is more than one.
        chief: whether this is the one that writes the run's files.
    """

    def __init__(self, strategy):
        self._strategy = strategy
        multi = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        replicas = strategy.num_replicas_in_sync
        self.local = len(strategy.extended.worker_devices) if multi else replicas
        self.several = replicas > self.local
        self.chief = strategy.extended.should_checkpoint
        self._total = None

    def sum(self, value):
        """The sum of a float over all workers, which all have to call this; waits for them.

        Raises:
            LostWorkerError: another worker is gone.
        """
        if not self.several:
            return float(value)
        if self._total is None:

            @tf.function(input_signature=[tf.TensorSpec([], tf.float64)])
            def total(value):
                def reduce(value):
                    context = tf.distribute.get_replica_context()
                    # A copy on the replica's device, by which the reduction finds its way.
                    return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(value))

                sums = self._strategy.run(reduce, args=(value,))
                return self._strategy.experimental_local_results(sums)[0]

            self._total = total
        with self.readable_errors():
            return float(self._total(tf.constant(value / self.local, tf.float64)))

    def wait(self):
        """Returns once all workers have called it."""
        self.sum(0.0)

    @contextlib.contextmanager
    def readable_errors(self):
        """Turns what TensorFlow says of a step that could not be taken into errors of this package.

        Raises:
            LostWorkerError: another worker is gone or, where there is none, the device.
            OutOfMemoryError: the device's memory does not do.
        """
        try:
            yield
        except tf.errors.ResourceExhaustedError as error:
            raise OutOfMemoryError(_first_line(error)) from error
        except (
            tf.errors.UnavailableError,
            tf.errors.AbortedError,
            tf.errors.CancelledError,
        ) as error:
            if not self.several:
                raise LostWorkerError.device(_first_line(error)) from error
            raise LostWorkerError(
                "Another worker has stopped or cannot be reached. Its own last lines say why. "
                "Start the same command on all workers again: they continue from the last "
                "checkpoint."
            ) from error


def _first_line(error):
    return error.message.partition("\n")[0]


def _split(dataset, first, local, replicas):
    """Elements for the replicas `first` to `first + local - 1` in turn, of batches for all."""
    if replicas == 1:
        return dataset

    def part(array):
        rows = array.shape[0] or tf.shape(array)[0]
        sizes = [array.shape[i] or tf.shape(array)[i] for i in range(1, array.shape.rank)]
        parts = tf.reshape(array, [replicas, rows // replicas, *sizes])
        return parts[first : first + local]

    def parts(*batch):
        return tf.data.Dataset.from_tensor_slices(tf.nest.map_structure(part, batch))

    return dataset.flat_map(parts).prefetch(2 * local)

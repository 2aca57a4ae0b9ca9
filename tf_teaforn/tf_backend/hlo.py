"""The train step as XLA's compiler takes it."""

import tensorflow as tf

from tf_teaforn.tf_backend.step_runner import StepRunner


def train_step_hlo(model, batch, skip_nonfinite=False):
    """The step that `StepRunner` runs on one device, as a serialised HloModuleProto.

    Args:
        model: a compiled `TeaForN`.
        batch: (inputs, targets, weights), anything with shapes and dtypes.
        skip_nonfinite: as `StepRunner` takes it.
    """
    specs = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), batch)
    runner = StepRunner(tf.distribute.get_strategy(), model, skip_nonfinite)
    step = runner.step("train_step", specs)
    flat = tf.nest.flatten(specs)

    @tf.function(input_signature=flat, jit_compile=True)
    def run(*tensors):
        step(*tf.nest.pack_sequence_as(specs, tensors))

    return run.experimental_get_compiler_ir(*flat)(stage="hlo_serialized")

"""Compiling for a TPU without having one: libtpu's compiler runs on any machine."""

import re
from typing import NamedTuple

import jax
import keras
import numpy as np
from jax.experimental import topologies
from jax.extend import mlir as extended_mlir
from jax.interpreters import mlir
from jaxlib import _hlo, _jax
from jaxlib.mlir import ir

from tf_teaforn.errors import UserError
from tf_teaforn.hlo import seeds
from tf_teaforn.jax_backend.strategy import (
    compiled_step,
    distributed,
    guarded,
    training_variables,
)
from tf_teaforn.out_of_memory import shortage

# GB of memory that a program sees as one device, and chips of the smallest machine: Google Cloud's
# pages of each version (cloud.google.com/tpu/docs: v2, v3, v4, v5e, v5p, v6e). A chip of v2 and v3
# is two devices.
MEMORY_GB = {"v2": 8, "v3": 16, "v4": 32, "v5e": 16, "v5p": 95, "v6e": 32}
_TOPOLOGY = re.compile(r"(v\d[a-z]*):(\d+(?:x\d+)+)")


class Memory(NamedTuple):
    """Bytes on each device.

    Attributes:
        arguments: weights, optimizer and batch; updated in place.
        temporaries: activations, gradients and whatever else lives during the step.
        program: the code, on the device too; its size depends on how far it is optimized.
    """

    arguments: int
    temporaries: int
    program: int

    @property
    def total(self):
        return self.arguments + self.temporaries


class DoesNotFit(Exception):
    """A program needs more memory than there is; says how much of how much."""


class Topology:
    """A slice of TPU chips to compile for.

    Args:
        name: version and shape, such as "v5e:1x1" or "v5e:2x2".

    Raises:
        UserError: no such version, or not a shape that the compiler knows.
    """

    def __init__(self, name):
        found = _TOPOLOGY.fullmatch(name)
        if not found or found[1] not in MEMORY_GB:
            raise UserError(
                f"--topology={name}: write a version, {', '.join(MEMORY_GB)}, and a shape, such "
                "as v5e:1x1."
            )
        self.memory = MEMORY_GB[found[1]] * 2**30
        bounds = [int(size) for size in found[2].split("x")]
        bounds += [1] * (3 - len(bounds))
        try:
            self.devices = topologies.get_topology_desc(
                name, platform="tpu", chips_per_host_bounds=tuple(bounds)
            ).devices
        except (RuntimeError, NotImplementedError) as error:
            raise UserError(f"--topology={name}: {error}") from error

    def lower(self, build_model, batch, skip_nonfinite=False):
        """The `Program` of a `TeaForN`'s `train_step`, the batch split over all devices.

        Args:
            build_model: returns the model, compiled in Keras' sense and its optimizer built.
            batch: anything with shapes and dtypes.
            skip_nonfinite: as `StepRunner` takes it.
        """
        models = []
        # Shapes are enough: no weights are computed.
        jax.eval_shape(lambda: models.append(build_model()))
        (model,) = models
        mesh = jax.sharding.Mesh(np.array(self.devices), "batch")

        def placed(*axes):
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
            return lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        state = jax.tree.map(placed(), training_variables(model))
        shardings = jax.tree.map(lambda x: x.sharding, state)
        names = [f"tpu:{index}" for index in range(len(self.devices))]
        distribution = keras.distribution.DataParallel(devices=names, auto_shard_dataset=False)
        step = guarded(model.train_step, skip_nonfinite)
        step = compiled_step(distributed(step, distribution), shardings)
        lowered = step.lower(state, jax.tree.map(placed("batch"), batch))
        return Program(lowered.as_text("hlo"), lambda: lowered.compile().memory_analysis())

    def load(self, module):
        """The `Program` of one device that a serialised HloModuleProto of TensorFlow's holds."""
        text = _hlo.XlaComputation(module).as_hlo_text(print_large_constants=True)

        def compile_():
            module = _hlo.hlo_module_from_text(_as_for_tpu(text)).as_serialized_hlo_module_proto()
            with mlir.make_ir_context():
                program = ir.Module.parse(extended_mlir.hlo_to_stablehlo(module))
                devices = _jax.DeviceList(tuple(self.devices[:1]))
                return self.devices[0].client.compile(program, devices).get_compiled_memory_stats()

        return Program(text, compile_)


class Program:
    """A program for TPUs.

    Args:
        text: its HLO module before XLA's passes.
        compile_: compiles it; returns JAX's `CompiledMemoryStats`.
    """

    def __init__(self, text, compile_):
        self.text = text
        self._compile = compile_

    def memory(self):
        """`Memory` of the compiled program.

        Raises:
            DoesNotFit: the compiler found no way to keep within the device's memory.
        """
        try:
            stats = self._compile()
        except jax.errors.JaxRuntimeError as error:
            found = shortage(str(error))
            if not found:
                raise
            raise DoesNotFit(str(found)) from error
        # What is updated in place is an argument and a result.
        results = stats.output_size_in_bytes - stats.alias_size_in_bytes
        return Memory(
            stats.argument_size_in_bytes,
            stats.temp_size_in_bytes + max(results, 0),
            stats.generated_code_size_in_bytes,
        )


_PHILOX = re.compile(
    r"^( *)(\S+) = \(u64\[3\]\{0\}, (\S+)\) rng-bit-generator\((\S+)\), algorithm=rng_philox",
    re.MULTILINE,
)


def _as_for_tpu(text):
    """What TensorFlow would have written for a TPU, from what it wrote for the CPU.

    On a TPU it draws random numbers by the device's own generator, whose state is the seed as it
    is (tf2xla/kernels/stateless_random_ops_v2.cc: `GetKeyCounter`); Philox' state, which is longer,
    takes some hundred operations to make. Copies of variables to be updated are not StableHLO.
    """
    seed_of = seeds(text)

    def drawn(found):
        indent, name, shape, state = found.groups()
        lines = (
            f"{name}.seed = u64[2]{{0}} convert({seed_of[name]})",
            f"{name}.drawn = (u64[2]{{0}}, {shape}) rng-bit-generator({name}.seed), "
            "algorithm=rng_default",
            f"{name}.bits = {shape} get-tuple-element({name}.drawn), index=1",
            f"{name} = (u64[3]{{0}}, {shape}) tuple({state}, {name}.bits)",
        )
        return "\n".join(indent + line for line in lines)

    return _PHILOX.sub(drawn, text).replace(" copy(", " reshape(")

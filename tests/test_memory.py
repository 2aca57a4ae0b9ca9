"""Memory of a step: estimates against what the process takes; what to lower when it is short."""

import ctypes
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import tensorflow as tf

from tf_teaforn import TeaForN, build_model
from tf_teaforn.config import RunConfig
from tf_teaforn.out_of_memory import StepMemory, advice
from tf_teaforn.tf_backend.memory import peak_bytes
from tf_teaforn.tf_backend.step_runner import StepRunner

MB = 2**20
# Floating-point numbers of an array that malloc gives back to the system at once.
SIZE = 12 * MB


def resident(name):
    """VmRSS or, the highest so far, VmHWM in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024


def measured(function, *arguments):
    """MB that the process grew by, at the most, during a call."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    function(*arguments)
    return resident("VmHWM") - before


def in_a_new_process(function):
    """What `function` returns there: TensorFlow keeps the memory that earlier tests took."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function).result()


def wide(x):
    """Sum of a gradient whose backward pass needs `x` and five arrays as large."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x
        for _ in range(6):
            y = tf.sin(y)
        total = tf.reduce_sum(y)
    return tf.reduce_sum(tape.gradient(total, x))


def wide_gradient():
    x = tf.zeros([SIZE])
    step = tf.function(wide).get_concrete_function(x)
    return peak_bytes(step.graph) / MB, measured(step, x)


def test_the_peak_of_a_graph_is_what_it_takes():
    estimate, taken = in_a_new_process(wide_gradient)
    assert 6 * 48 <= estimate <= 9 * 48
    assert taken == pytest.approx(estimate, rel=0.3)


def test_views_and_what_is_not_needed_any_more_take_nothing():
    def narrow(x):
        for _ in range(5):
            x = tf.reshape(tf.exp(x), [-1, 2])
        return tf.reduce_sum(x)

    graph = tf.function(narrow).get_concrete_function(tf.TensorSpec([1000, 2])).graph
    # An operation's input and output.
    assert 16_000 <= peak_bytes(graph) <= 16_100


def test_functions_inside_count_once():
    def looped(x):
        return tf.while_loop(lambda i, _: i < 9, lambda i, s: (i + 1, s + wide(x)), (0, 0.0))[1]

    inner, outer = (
        peak_bytes(tf.function(function).get_concrete_function(tf.TensorSpec([1000])).graph)
        for function in (wide, looped)
    )
    # The loop carries `x`.
    assert inner <= outer <= inner + 4100


def step_in_parts():
    # From 64 KiB on malloc gives memory back to the system at once (M_MMAP_THRESHOLD).
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    seq2seq = build_model("transformer_tiny", 500, num_layers=1)
    model = TeaForN(seq2seq, n=1, micro_batch_tokens=256)
    model.compile(optimizer="sgd")
    runner = StepRunner(tf.distribute.get_strategy(), model)
    ids = tf.ones([128, 32], tf.int32)
    inputs = {"encoder_token_ids": ids, "decoder_token_ids": ids}
    step = runner.step("train_step")
    step(inputs, ids, tf.ones([128, 32]))
    # 16 parts.
    needed = runner.temporary_bytes(128, 32, 32) / MB
    return needed, measured(step, inputs, ids, tf.ones([128, 32]))


def test_parts_of_a_batch_take_the_memory_of_one_part():
    """TensorFlow would otherwise begin several parts at once."""
    needed, taken = in_a_new_process(step_in_parts)
    assert 0.2 * needed < taken < 2 * needed


MEMORY = StepMemory(600 * MB, 1200 * MB, 600 * MB, 8000 * MB, 6400 * MB)


def advise(changes=(), reason="OOM when allocating [9,9]", **memory):
    config = RunConfig(task="text").replace({"batch_tokens": 8192, **dict(changes)})
    return advice(config, 7, reason, MEMORY._replace(**memory), replicas=1)


def test_what_to_lower_and_to_which_value():
    # 0.9 x 6400 - 2400 = 3360 MB, which is 0.42 of 8000.
    assert advise() == (
        "Step 7 does not fit into the device's memory (OOM when allocating [9,9]). Weights, "
        "optimizer and gradients take 2.34 GiB, the activations of 8192 tokens about 7.81 GiB, of "
        "6.25 GiB. Write --micro_batch_tokens=3400, the same update in parts, or --remat=stage, "
        "which computes activations twice; with another --model_dir or before the first "
        "checkpoint also --batch_tokens=3400 or --optimizer=adafactor, which saves 1.17 GiB."
    )


@pytest.mark.parametrize(
    ("changes", "memory", "expected"),
    [
        # Nothing is known, or the estimate says that it fits: half.
        ({}, {"activations": None}, "--micro_batch_tokens=4000, "),
        ({}, {"limit": None}, "--micro_batch_tokens=4000, "),
        ({}, {"limit": 10**12}, "--micro_batch_tokens=4000, "),
        # Parts already: their size is what counts.
        ({"micro_batch_tokens": 1000}, {}, "the activations of 1000 tokens about 7.81 GiB"),
        ({"micro_batch_tokens": 1000}, {}, "--micro_batch_tokens=320, "),
        ({"remat": "layer"}, {}, "in parts; with another"),
        ({"optimizer": "adafactor"}, {}, "also --batch_tokens=3400."),
        ({}, {"limit": 2000 * MB}, "No batch fits beside them: write --optimizer=adafactor, "),
        ({}, {"limit": 2000 * MB}, "which saves 1.17 GiB or a smaller --model."),
        (
            {"init_from": "x"},
            {"limit": 2000 * MB},
            "write --optimizer=adafactor, which saves 1.17 ",
        ),
        (
            {"init_from": "x", "optimizer": "adafactor"},
            {"limit": 2000 * MB},
            "No batch fits beside them: take a device with more memory.",
        ),
        # Two rows, of which one fits: no fewer tokens than it has.
        ({"micro_batch_tokens": 600}, {"activations": 6000 * MB}, "--micro_batch_tokens=280, "),
        ({"batch_tokens": 520}, {"activations": 6700 * MB}, "--micro_batch_tokens=256, "),
    ],
)
def test_other_cases(changes, memory, expected):
    assert expected in advise(changes, **memory)


@pytest.mark.parametrize("tokens", [{"micro_batch_tokens": 256}, {"batch_tokens": 400}])
def test_fewer_tokens_than_a_row_has_are_no_advice(tokens):
    # 0.42 of 256.
    assert advise(tokens).endswith(
        "One row of 256 tokens on each device does not fit. Write --remat=stage, which computes "
        "activations twice; with another --model_dir or before the first checkpoint also "
        "--max_source_length=100 --max_target_length=100 --micro_batch_tokens=100 or "
        "--optimizer=adafactor, which saves 1.17 GiB."
    )
    others = {"remat": "layer", "optimizer": "adafactor", "max_target_length": 64}
    assert advise({**tokens, **others}).endswith(
        "does not fit. Write, with another --model_dir or before the first checkpoint, "
        "--max_source_length=100 --micro_batch_tokens=100."
    )


def test_every_replica_has_a_row():
    config = RunConfig(task="text").replace({"batch_tokens": 3000})
    # Eleven rows on one device; on eight, one each.
    assert "--micro_batch_tokens=1100, " in advice(config, 7, "OOM", MEMORY, 1)
    assert "--max_target_length=100 --micro_batch_tokens=800 or" in advice(
        config, 7, "OOM", MEMORY, 8
    )


@pytest.mark.parametrize(
    ("devices", "replicas", "expected"),
    [
        (1, 1, None),
        (2, 2, "model:2"),
        (3, 3, None),
        (8, 8, "batch:4,model:2"),
        (8, 4, "batch:2,model:4"),
        (2, 1, None),
        (2, 4, "model:2"),
    ],
)
def test_a_mesh_is_for_the_devices_that_there_are(devices, replicas, expected, monkeypatch):
    monkeypatch.setattr(
        "keras.distribution.list_devices", lambda: ["tpu_system:0"] + ["tpu:0"] * devices
    )
    config = RunConfig(task="text")
    line = advice(config, 7, "OOM", MEMORY._replace(limit=2000 * MB), replicas)
    if expected is None:
        assert "mesh" not in line
    else:
        assert line.endswith(f"a smaller --model or KERAS_BACKEND=jax and --mesh={expected}.")


def test_the_compiler_s_own_figures_come_first():
    line = advise(reason="Ran out of memory in memory space hbm. Used 20.34G of 15.75G hbm.")
    # 18 GiB of activations; 0.9 x 15.75 - 2.34 = 11.83 GiB are left.
    assert "of 8192 tokens about 18.00 GiB, of 15.75 GiB" in line
    assert "--micro_batch_tokens=5300, " in line


def test_the_compiler_may_count_temporaries_alone():
    words = "the total memory required for HLO temporaries (16.44G) exceeds available HBM (15.75G)"
    line = advise(reason=words)
    # 0.59 GiB of them are gradients; 0.9 x 15.75 - 2.34 = 11.83 GiB are left for the others.
    assert "of 8192 tokens about 15.85 GiB, of 15.75 GiB" in line
    assert "--micro_batch_tokens=6100, " in line

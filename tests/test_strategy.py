"""Which strategy a name gives on which machine, and what a TPU's asks of the steps.

TensorFlow is told of devices that this machine lacks; the strategies over them are only named.
"""

import json
import types

import numpy as np
import pytest
import tensorflow as tf

from tf_teaforn import TeaForN, testing
from tf_teaforn.errors import UserError
from tf_teaforn.tf_backend.step_runner import StepRunner
from tf_teaforn.tf_backend.strategy import make_strategy, peak_memory
from tf_teaforn.tf_backend.train_step import TrainStep

ONE = tf.distribute.get_strategy()
TWO_WORKERS = {"worker": ["host0:1", "host1:1"]}


@pytest.fixture
def machine(monkeypatch):
    """Function that sets the devices and TF_CONFIG; the strategies are (name, argument)s."""

    def set_up(devices=None, tf_config=None):
        known = [
            tf.config.PhysicalDevice(f"{kind}:{index}", kind)
            for kind, count in (devices or {"CPU": 1}).items()
            for index in range(count)
        ]

        def list_devices(kind=None):
            return [device for device in known if kind in (None, device.device_type)]

        for function in ("list_physical_devices", "list_logical_devices"):
            monkeypatch.setattr(tf.config, function, list_devices)
        monkeypatch.delenv("TF_CONFIG", raising=False)
        if tf_config is not None:
            monkeypatch.setenv("TF_CONFIG", tf_config)

    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda: "mirrored")
    monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", lambda: "multi_worker")
    monkeypatch.setattr(tf.distribute, "TPUStrategy", lambda resolver: ("tpu", resolver))
    resolver = types.SimpleNamespace(connect=lambda name: f"connected to {name}")
    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", resolver)
    return set_up


def cluster(task_type="worker", index=0, **jobs):
    return json.dumps({"cluster": jobs or TWO_WORKERS, "task": {"type": task_type, "index": index}})


@pytest.mark.parametrize(
    ("devices", "tf_config", "expected"),
    [
        ({"CPU": 1}, None, ONE),
        # Parts of one processor gain nothing.
        ({"CPU": 2}, None, ONE),
        ({"CPU": 1, "GPU": 1}, None, ONE),
        ({"CPU": 1, "GPU": 2}, None, "mirrored"),
        ({"CPU": 1, "TPU": 8}, None, ("tpu", "connected to local")),
        ({"CPU": 1, "GPU": 2, "TPU": 1}, None, ("tpu", "connected to local")),
        ({"CPU": 1}, cluster(), "multi_worker"),
        ({"CPU": 1, "GPU": 2, "TPU": 1}, cluster(), "multi_worker"),
        ({"CPU": 1}, cluster("chief", chief=["a:1"], worker=["b:1"]), "multi_worker"),
        # A cluster of one, and one that others than workers are told of.
        ({"CPU": 1, "GPU": 2}, cluster(worker=["a:1"]), "mirrored"),
        ({"CPU": 1}, cluster("evaluator"), ONE),
        ({"CPU": 1}, "no JSON", ONE),
    ],
)
def test_auto(machine, devices, tf_config, expected):
    machine(devices, tf_config)
    assert make_strategy("auto") == make_strategy() == expected


def test_names(machine):
    machine({"CPU": 1, "GPU": 2, "TPU": 1}, cluster())
    assert make_strategy("one") is ONE
    assert make_strategy("mirrored") == "mirrored"
    assert make_strategy("tpu", tpu="pod-7") == ("tpu", "connected to pod-7")
    assert make_strategy("multi_worker") == "multi_worker"
    # One device of any kind is enough for what is asked for by name.
    machine({"CPU": 1})
    assert make_strategy("mirrored") == "mirrored"
    assert make_strategy("tpu", tpu="pod-7") == ("tpu", "connected to pod-7")
    machine({"CPU": 1}, cluster(worker=["a:1"]))
    assert make_strategy("multi_worker") == "multi_worker"


def test_an_unknown_name(machine):
    machine()
    with pytest.raises(UserError, match=r"--strategy=two: write one of auto, one, mirrored,"):
        make_strategy("two")


@pytest.mark.parametrize("error", [ValueError("none"), tf.errors.NotFoundError(None, None, "none")])
@pytest.mark.parametrize("name", ["auto", "tpu"])
def test_a_tpu_that_is_not_there(machine, monkeypatch, name, error):
    def connect(name):
        raise error

    machine({"TPU": 1})
    monkeypatch.setattr(tf.distribute.cluster_resolver.TPUClusterResolver, "connect", connect)
    with pytest.raises(UserError, match=r"--strategy=tpu --tpu=pod-7: no TPU found \(.*none.*\)"):
        make_strategy(name, tpu="pod-7")


def test_a_tpu_of_another_machine(machine, monkeypatch):
    def found(job):
        names = [f"/job:{job}/replica:0/task:0/device:TPU:{index}" for index in (0, 1)]
        return lambda kind: [tf.config.LogicalDevice(name, kind) for name in names]

    machine()
    monkeypatch.setattr(tf.config, "list_logical_devices", found("localhost"))
    assert make_strategy("tpu") == ("tpu", "connected to local")
    monkeypatch.setattr(tf.config, "list_logical_devices", found("worker"))
    message = (
        r"--tpu=pod-7: this TPU is not of this machine \(/job:worker/.*/device:TPU:0\)\. "
        r"Run on the TPU VM itself, with --tpu=local; a TPU of several hosts is not supported\."
    )
    with pytest.raises(UserError, match=message):
        make_strategy("tpu", tpu="pod-7")


@pytest.mark.parametrize(
    "tf_config",
    [
        None,
        "",
        "no JSON",
        "[]",
        json.dumps({"cluster": TWO_WORKERS}),
        json.dumps({"task": {"type": "worker", "index": 0}}),
        cluster(index=2),
        cluster("evaluator"),
    ],
)
def test_workers_without_a_usable_tf_config(machine, tf_config):
    machine(tf_config=tf_config)
    with pytest.raises(UserError, match="--strategy=multi_worker needs .* TF_CONFIG"):
        make_strategy("multi_worker")


@pytest.mark.parametrize("name", ["auto", "multi_worker"])
def test_workers_that_cannot_be_joined(machine, monkeypatch, name):
    def join():
        raise RuntimeError("too late")

    machine(tf_config=cluster())
    monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", join)
    with pytest.raises(UserError, match=r"cannot join the other workers \(too late\)"):
        make_strategy(name)


@pytest.mark.parametrize(
    ("devices", "replicas", "expected"),
    [
        ({"CPU": 1}, 1, False),
        ({"CPU": 2}, 2, False),
        ({"CPU": 1, "GPU": 1}, 1, True),
        # One replica on a machine with more devices.
        ({"CPU": 1, "GPU": 2}, 1, True),
        ({"CPU": 1, "GPU": 2}, 2, False),
        # The strategy compiles by itself.
        ({"CPU": 1, "TPU": 1}, 1, False),
        ({"CPU": 1, "TPU": 8}, 8, False),
    ],
)
def test_what_is_compiled(machine, monkeypatch, devices, replicas, expected):
    machine(devices)
    strategy = types.SimpleNamespace(num_replicas_in_sync=replicas)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: strategy)
    assert TrainStep().supports_jit is expected


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_step_is_compiled_where_that_is_supported(machine, gpus):
    model = teaforn()
    assert model.jit_compile is False
    machine({"CPU": 1, "GPU": gpus})
    model = teaforn(model.seq2seq)
    assert model.jit_compile is bool(gpus)


def teaforn(seq2seq=None):
    model = TeaForN(seq2seq or testing.tiny_model(), n=1)
    model.compile(optimizer="sgd")
    return model


LONG, SHORT = (testing.padded_batch(testing.random_pairs(2, length, length)) for length in (5, 3))


def endless(batches, static):
    """Dataset of the batches, again and again, whose shapes are known before or not."""

    def spec(array):
        return tf.TensorSpec(array.shape if static else [None, None], array.dtype)

    signature = tf.nest.map_structure(spec, batches[0])
    return tf.data.Dataset.from_generator(lambda: batches, output_signature=signature).repeat()


@pytest.fixture
def on_tpu(monkeypatch):
    """A runner that takes the strategy of one device for a TPU's."""
    monkeypatch.setattr(tf.distribute, "TPUStrategy", type(ONE))
    return StepRunner(ONE, teaforn())


def assert_trained_on(runner, batches):
    """Compares with one eager step after the other."""
    expected = teaforn()
    for batch in batches:
        expected.train_step(batch)
    for weight, other in zip(runner.model.weights, expected.weights, strict=True):
        np.testing.assert_allclose(weight, other, rtol=0, atol=1e-6, err_msg=weight.path)
    assert runner.model.optimizer.iterations.numpy() == len(batches)


def test_each_shape_is_a_program_of_its_own_on_a_tpu(on_tpu):
    batches = [LONG, SHORT, SHORT, LONG]
    iterator = on_tpu.iterator(lambda share: endless(batches, static=False))
    message = "--steps_per_execution=2: on a TPU it takes batches of one shape. Add --batching=fix"
    with pytest.raises(UserError, match=message):
        on_tpu.train(iterator, first_step=1, steps=2)
    for step in (1, 2, 3, 4):
        on_tpu.train(iterator, first_step=step)
    assert on_tpu._train_once().experimental_get_tracing_count() == 2
    assert_trained_on(on_tpu, batches)
    on_tpu.test(endless(batches, static=False).take(4))
    assert on_tpu.step("test_step").experimental_get_tracing_count() == 2


def test_batches_of_one_shape_take_several_steps_on_a_tpu(on_tpu):
    iterator = on_tpu.iterator(lambda share: endless([LONG], static=True))
    on_tpu.train(iterator, first_step=1, steps=2)
    on_tpu.train(iterator, first_step=3)
    assert_trained_on(on_tpu, [LONG] * 3)
    assert on_tpu._train_loop().experimental_get_tracing_count() == 1


@pytest.mark.parametrize("index", [0, 1])
def test_peak_memory_is_that_of_this_worker(index, monkeypatch):
    """With collective operations each worker lists the GPUs of all."""
    place = "/job:worker/replica:0/task:{}/device:GPU:0"
    held = {place.format(0): 5, place.format(1): 7}
    devices = [types.SimpleNamespace(name=name) for name in held]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: devices)

    def info(name):
        if name != place.format(index):
            raise ValueError(f"No matching devices found for '{name}'")
        return {"peak": held[name]}

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", info)
    monkeypatch.setenv("TF_CONFIG", cluster(index=index))
    assert peak_memory() == {"peak_device_bytes": [5, 7][index]}
    # One that does not tell.
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda _: info("none"))
    assert peak_memory() == {}
    monkeypatch.delenv("TF_CONFIG")
    devices[:] = [types.SimpleNamespace(name=f"/device:GPU:{i}") for i in range(2)]
    monkeypatch.setattr(
        tf.config.experimental, "get_memory_info", lambda name: {"peak": int(name[-1]) + 1}
    )
    assert peak_memory() == {"peak_device_bytes": 2}

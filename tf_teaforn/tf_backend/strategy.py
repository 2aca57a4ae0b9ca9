"""Distribution strategies, by the names that --strategy has."""

import contextlib
import json
import os

import tensorflow as tf
from tensorflow.python.client import device_lib

from tf_teaforn.errors import UserError

STRATEGIES = ("auto", "one", "mirrored", "multi_worker", "tpu")


def make_strategy(name="auto", tpu="local"):
    """A `tf.distribute.Strategy`.

    "multi_worker" has to come before TensorFlow's first operation in the process.

    Args:
        name: "one" device; "mirrored" over all local accelerators; "multi_worker", one of the
            processes that TF_CONFIG lists; "tpu"; "auto": multi_worker where TF_CONFIG lists
            several, else TPU where there is one, else mirrored over several GPUs, else one device.
        tpu: "local"; with another name a TPU is found, but only one of this machine can be used.

    Raises:
        UserError: unknown name, no TPU, a TPU of another machine, or no usable TF_CONFIG.
    """
    if name not in STRATEGIES:
        raise UserError(f"--strategy={name}: write one of {', '.join(STRATEGIES)}.")
    workers = _workers(required=name == "multi_worker")
    if name == "multi_worker" or (name == "auto" and workers > 1):
        try:
            return tf.distribute.MultiWorkerMirroredStrategy()
        except (ValueError, RuntimeError, tf.errors.OpError) as error:
            raise UserError(
                f"--strategy=multi_worker: cannot join the other workers ({error}). Check TF_CONFIG"
                "; every worker needs an address of its own that the others can reach."
            ) from error
    if name == "tpu" or (name == "auto" and tf.config.list_physical_devices("TPU")):
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(tpu)
        except (ValueError, tf.errors.OpError) as error:
            raise UserError(
                f"--strategy=tpu --tpu={tpu}: no TPU found ({error}). Run on a TPU VM with "
                "tensorflow-tpu installed, or write --strategy=one without --tpu."
            ) from error
        # The data come from a Python function, which only this process has.
        names = [device.name for device in tf.config.list_logical_devices("TPU")]
        if any(tf.DeviceSpec.from_string(name).job not in (None, "localhost") for name in names):
            raise UserError(
                f"--strategy=tpu --tpu={tpu}: this TPU is not of this machine ({names[0]}). Run "
                "on the TPU VM itself, with --tpu=local; a TPU of several hosts is not supported."
            )
        return tf.distribute.TPUStrategy(resolver)
    if name == "mirrored" or (name == "auto" and len(tf.config.list_logical_devices("GPU")) > 1):
        return tf.distribute.MirroredStrategy()
    return tf.distribute.get_strategy()


def peak_memory():
    """{"peak_device_bytes": the most that any local GPU held}; {} where there is none."""
    peaks = []
    for device in tf.config.list_logical_devices("GPU"):
        # One that tells nothing must not end the run.
        with contextlib.suppress(ValueError, tf.errors.OpError):
            if _is_local(device):
                peaks.append(tf.config.experimental.get_memory_info(device.name)["peak"])
    return {"peak_device_bytes": max(peaks)} if peaks else {}


def _is_local(device):
    """Of several workers each lists the devices of all."""
    place = tf.DeviceSpec.from_string(device.name)
    task = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {})
    return place.job in (None, "localhost") or (place.job, place.task) == (
        task.get("type"),
        task.get("index"),
    )


def device_memory():
    """Bytes of the first local GPU, else of this machine; None on a TPU, which does not tell."""
    if tf.config.list_logical_devices("TPU"):
        return None
    for device in device_lib.list_local_devices():
        if device.device_type == "GPU":
            return device.memory_limit
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _workers(required):
    """Number of processes in TF_CONFIG, 0 without one."""
    text = os.environ.get("TF_CONFIG", "")
    if not text and not required:
        return 0
    try:
        config = json.loads(text)
        jobs = {job: list(config["cluster"].get(job, ())) for job in ("chief", "worker")}
        task = config["task"]
        jobs[task["type"]][task["index"]]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        if not required:
            return 0
        raise UserError(
            "--strategy=multi_worker needs the environment variable TF_CONFIG, in each process "
            "with its own index: "
            '{"cluster": {"worker": ["host0:port", "host1:port"]}, "task": {"type": "worker", '
            '"index": 0}}.'
        ) from error
    return sum(map(len, jobs.values()))

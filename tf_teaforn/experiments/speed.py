"""How fast a run was and what memory it took, from its TensorBoard files."""

import statistics

from etils import epath
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray


def read_speed(folder: epath.PathLike) -> dict[str, float]:
    """Medians over a run's log windows; the first, which compiles, counts only if it is alone.

    Args:
        folder: a run's `tensorboard`.

    Returns:
        "steps_per_second", "target_tokens_per_second", "seconds" from the first to the last point
        and, where the device tells, "peak_device_bytes"; {} if nothing was logged.
    """
    if not epath.Path(folder).exists():
        return {}
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    tags = events.Tags().get("tensors", [])
    if not {"tokens", "target_tokens_per_second"} <= set(tags):
        return {}
    tokens, speeds = (_points(events, name) for name in ("tokens", "target_tokens_per_second"))
    steps = sorted(set(tokens) & set(speeds))
    windows = [
        (step - before, tokens[step][0], speeds[step][0])
        for before, step in zip([0, *steps], steps, strict=False)
    ]
    windows = windows[1:] or windows
    times = [time for points in (tokens, speeds) for _, time in points.values()]
    speed = {
        "steps_per_second": statistics.median(
            steps * speed / count for steps, count, speed in windows if count
        ),
        "target_tokens_per_second": statistics.median(speed for _, _, speed in windows),
        "seconds": max(times) - min(times),
    }
    if "peak_device_bytes" in tags:
        speed["peak_device_bytes"] = max(
            v for v, _ in _points(events, "peak_device_bytes").values()
        )
    return speed


def _points(events, name):
    """{step: (value, time)}."""
    return {
        event.step: (float(make_ndarray(event.tensor_proto)), event.wall_time)
        for event in events.Tensors(name)
    }

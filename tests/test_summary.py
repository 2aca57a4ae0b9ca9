"""A continued run shows each point once."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tf_teaforn.tf_backend.summary import ScalarWriter


@pytest.mark.parametrize("name", ["run", "run[1]"])
def test_points_after_the_last_step_are_withdrawn(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    for last_step, steps in (
        (0, range(1, 4)),
        (0, range(1, 9)),
        (5, range(6, 12)),
        (10, range(11, 13)),
    ):
        for path in folder.iterdir():
            # A process that was killed while it wrote.
            with path.open("ab") as file:
                file.write(b"torn")
        writer = ScalarWriter(folder, last_step)
        for step in steps:
            writer.write(step, {"loss": float(step)})
    events = EventAccumulator(str(folder), {"tensors": 0})
    events.Reload()
    # Files of one second are read in the order of TensorFlow's counter as text: 10 before 9.
    points = sorted(events.Tensors("loss"), key=lambda point: point.wall_time)
    assert [point.step for point in points] == [*range(1, 13)]

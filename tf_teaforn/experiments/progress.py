"""Lines about the runs of a grid."""

import datetime
import logging

_logger = logging.getLogger(__name__)


class Progress:
    """A line a run, with an estimate of the time left.

    Args:
        runs: of the grid.
        parallel: how many at a time.
        started: the step that a run goes on from, by its name; its last step if it is done.
        seconds: what runs took by name, for the estimate until one is trained here.
    """

    def __init__(self, runs, parallel, started=None, seconds=None):
        started, seconds = started or {}, seconds or {}
        self.left = {run.name: _weight(run, started.get(run.name, 0)) for run in runs}
        self.total = len(runs)
        self.parallel = parallel
        self.measured = (0.0, 0)
        known = [run for run in runs if run.name in seconds]
        self.recorded = (
            sum(seconds[run.name] for run in known),
            sum(_weight(run) for run in known),
        )

    def report(self, run, outcome, seconds, trained):
        weight = self.left.pop(run.name)
        if trained and weight:
            self.measured = (self.measured[0] + seconds, self.measured[1] + weight)
        took = "" if seconds is None else f" in {datetime.timedelta(seconds=round(seconds))}"
        left, rest = "", sum(self.left.values())
        in_seconds, in_steps = self.measured if self.measured[1] else self.recorded
        if rest and in_steps:
            # One run is not faster for devices that have none.
            rest *= in_seconds / in_steps / min(self.parallel, len(self.left))
            left = f"; about {datetime.timedelta(seconds=round(rest))} left"
        done = self.total - len(self.left)
        _logger.info("[%d/%d] %s %s%s%s", done, self.total, run.name, outcome, took, left)


def _weight(run, start=0):
    """What there is to do from a step on, in steps of one stack of layers."""
    # An encoder and N decoders.
    return max(run.settings["train_steps"] - start, 0) * (1 + run.arm.n)

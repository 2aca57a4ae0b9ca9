"""Lines about the runs of a grid."""

import datetime
import logging

_logger = logging.getLogger(__name__)


class Progress:
    """A line a run, with an estimate of the time left from the runs that were trained."""

    def __init__(self, runs, parallel):
        self.left = {run.name: self._weight(run) for run in runs}
        self.total = len(runs)
        self.parallel = parallel
        self.seconds = self.weight = 0.0

    @staticmethod
    def _weight(run):
        # An encoder and N decoders.
        return run.settings["train_steps"] * (1 + run.arm.n)

    def report(self, run, outcome, seconds, trained):
        weight = self.left.pop(run.name)
        took = ""
        if trained:
            self.seconds, self.weight = self.seconds + seconds, self.weight + weight
        if seconds is not None:
            took = f" in {datetime.timedelta(seconds=round(seconds))}"
        left = ""
        if self.left and self.weight:
            rest = sum(self.left.values()) * self.seconds / self.weight / self.parallel
            left = f"; about {datetime.timedelta(seconds=round(rest))} left"
        done = self.total - len(self.left)
        _logger.info("[%d/%d] %s %s%s%s", done, self.total, run.name, outcome, took, left)

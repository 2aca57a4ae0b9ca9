"""Lines about the runs of a grid."""

import datetime
import logging

_logger = logging.getLogger(__name__)


class Progress:
    """A line a run, with an estimate of the time left from the runs that were trained.

    Args:
        runs: of the grid.
        parallel: how many at a time.
        done: names of those that are expected to take no time.
    """

    def __init__(self, runs, parallel, done=()):
        self.left = {run.name: 0 if run.name in done else self._weight(run) for run in runs}
        self.total = len(runs)
        self.parallel = parallel
        self.seconds = self.weight = 0.0

    @staticmethod
    def _weight(run):
        # An encoder and N decoders.
        return run.settings["train_steps"] * (1 + run.arm.n)

    def report(self, run, outcome, seconds, trained):
        del self.left[run.name]
        took = ""
        if trained:
            self.seconds += seconds
            self.weight += self._weight(run)
        if seconds is not None:
            took = f" in {datetime.timedelta(seconds=round(seconds))}"
        left, rest = "", sum(self.left.values())
        if rest and self.weight:
            rest *= self.seconds / self.weight / self.parallel
            left = f"; about {datetime.timedelta(seconds=round(rest))} left"
        done = self.total - len(self.left)
        _logger.info("[%d/%d] %s %s%s%s", done, self.total, run.name, outcome, took, left)

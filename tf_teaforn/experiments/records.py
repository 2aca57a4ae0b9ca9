"""What a sweep has done, run by run: its results file, kept whole while several threads write."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tf_teaforn.experiments import results as results_file


class Records:
    """The results file of a sweep, replaced as a whole with every change.

    What is recorded of a run is replaced too, never changed in place: whoever has it may keep it.

    Args:
        path: of the file, which need not be there.

    Raises:
        UserError: it is not a results file.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        self.reload()

    def reload(self):
        """Takes up what is in the file."""
        self._results = results_file.read(self.path)

    @property
    def experiments(self) -> Mapping[str, Any]:
        """{name: what there is of it}."""
        return self._results["experiments"]

    def set_experiment(self, name: str, about: Mapping[str, Any]):
        """Records what there is of an experiment."""
        with self._lock:
            self._results["experiments"][name] = about
            results_file.write(self.path, self._results)

    def run(self, name: str) -> Mapping[str, Any]:
        """What is recorded of a run; empty where nothing is."""
        return self._results["runs"].get(name, {})

    def runs(self) -> dict[str, Mapping[str, Any]]:
        """The same of all runs, by name."""
        with self._lock:
            return dict(self._results["runs"])

    def change_run(self, name: str, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]):
        """Replaces what is recorded of a run by what `change` makes of it, under a lock."""
        with self._lock:
            before = self.run(name)
            after = dict(change(before))
            if after != before:
                self._results["runs"][name] = after
                results_file.write(self.path, self._results)


def place(one: Mapping[str, Any]) -> tuple[str, str, int]:
    """What tells the evaluations of a run apart, and its comparisons."""
    return one["role"], one["checkpoint_flag"], one["beam_size"]

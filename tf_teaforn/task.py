"""A task: data, metrics and the settings that suit them, under one name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tf_teaforn.data.sources import Source
from tf_teaforn.errors import UserError, did_you_mean

# Metric a task asks for -> values it yields.
VALUES = {
    "bleu": ("bleu",),
    "chrf": ("chrf",),
    "rouge": ("rouge1", "rouge2", "rougeL", "rougeLsum"),
    "exact_match": ("exact_match",),
}


@dataclasses.dataclass(frozen=True)
class Task:
    """One registered task.

    Attributes:
        name: what `--task` takes.
        description: one line, shown by `--help`.
        source: sentence pairs.
        metrics: what evaluation computes: "bleu", "chrf", "rouge", "exact_match".
        headline_metric: the value that picks the best checkpoint: "bleu", "chrf", "rouge1",
            "rouge2", "rougeL", "rougeLsum" or "exact_match".
        defaults: flag name -> value, where the task differs from the global default. A flag on the
            command line wins.
        from_files: for tasks with options of their own, such as a user's files: makes the task
            from them; its arguments are their flags' names, among those of `cli/app.py`, each with
            a default.
        symbols: pieces that a vocabulary trained for the task has for themselves.
        truncate: whether training cuts what is longer than the maximum lengths, as summaries are
            learnt from the beginning of a document, rather than leaving the example out.

    Raises:
        ValueError: an unknown metric, or a headline that the metrics do not yield.
    """

    name: str
    description: str
    source: Source
    metrics: tuple[str, ...]
    headline_metric: str
    defaults: Mapping[str, Any]
    from_files: Callable[..., Task] | None = None
    symbols: tuple[str, ...] = ()
    truncate: bool = False

    def __post_init__(self):
        unknown = [metric for metric in self.metrics if metric not in VALUES]
        if unknown:
            raise ValueError(f"Task {self.name}: metric {unknown[0]!r} is none of {[*VALUES]}")
        values = [value for metric in self.metrics for value in VALUES[metric]]
        if self.headline_metric not in values:
            raise ValueError(
                f"Task {self.name}: headline_metric {self.headline_metric!r} is none of {values}"
            )

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the flags that `from_files` takes."""
        return tuple(self._parameters)

    def with_defaults(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """{flag: value} of `options`, and of what `from_files` takes for those left out."""
        return {name: given.default for name, given in self._parameters.items()} | dict(options)

    @property
    def _parameters(self):
        return inspect.signature(self.from_files).parameters if self.from_files else {}


_tasks: dict[str, Task] = {}


def register_task(task: Task) -> Task:
    """Makes `task` known to `get_task`, and returns it.

    Raises:
        ValueError: the name is taken.
    """
    if task.name in _tasks:
        raise ValueError(f"Task {task.name!r} is registered already")
    _tasks[task.name] = task
    return task


def get_task(name: str) -> Task:
    """The task of that name.

    Raises:
        UserError: there is none; says which there are.
    """
    if name not in _tasks:
        raise UserError(
            f"Unknown task {name!r}.{did_you_mean(name, _tasks)} Write --task= one of: "
            f"{', '.join(task_names())}."
        )
    return _tasks[name]


def task_names() -> tuple[str, ...]:
    """Names of all registered tasks, sorted."""
    return tuple(sorted(_tasks))

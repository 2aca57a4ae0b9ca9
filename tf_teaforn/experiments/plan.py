"""The grid of an experiment as the user asks for it: which runs there are."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tf_teaforn.errors import UserError
from tf_teaforn.experiments.catalog import ALL, SMALL_TASKS, SMALL_TEXT, Arm, Experiment
from tf_teaforn.task import Task


@dataclasses.dataclass(frozen=True)
class Options:
    """How to run an experiment.

    Attributes:
        scale: "paper" or "small".
        tasks: which of the experiment's tasks; none: all.
        seeds: none: the experiment's.
        arms: names of those to run; none: all.
        task_options: files of the user's, for the task "text", by flag.
        settings: settings of all runs that differ from the experiment's.
        train_flags: further flags of bin/train, as they are written.
        common_flags: further flags of all commands.
        vocabulary: SentencePiece file for all runs, or None.
        parallel: how many runs at a time; None: one a GPU, else one.
        command: the command line, for the record.
    """

    scale: str = "paper"
    tasks: Sequence[str] = ()
    seeds: Sequence[int] = ()
    arms: Sequence[str] = ()
    task_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    train_flags: Sequence[str] = ()
    common_flags: Sequence[str] = ()
    vocabulary: str | None = None
    parallel: int | None = None
    command: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run of the grid.

    Attributes:
        name: of its model directory.
        task: what it trains on.
        arm, seed: its place in the grid.
        settings: by flag.
    """

    name: str
    task: str
    arm: Arm
    seed: int
    settings: Mapping[str, Any]


def scaled(experiment: Experiment, scale: str) -> Experiment:
    """The experiment at a scale, "paper" or "small"."""
    return experiment.scaled_down() if scale == "small" else experiment


def chosen_tasks(experiment: Experiment, options: Options) -> dict[str, str]:
    """{the paper's task: what is trained on}.

    Raises:
        UserError: a task that is none of the experiment's, or files where none can be used.
    """
    unknown = [task for task in options.tasks if task not in experiment.tasks]
    if unknown:
        raise UserError(
            f"--task={unknown[0]}: the experiment {experiment.name} has "
            f"{', '.join(experiment.tasks)}."
        )
    names = tuple(options.tasks) or experiment.tasks
    if options.task_options and experiment.tasks != ("text",):
        if options.scale != "small":
            raise UserError(
                f"--{next(iter(options.task_options))}: at --scale=paper the experiment "
                f"{experiment.name} has data of its own. Add --scale=small, or leave it out."
            )
        if len(names) > 1:
            raise UserError(
                f"--{next(iter(options.task_options))}: these files can stand for one task. Add "
                f"--task={names[0]}, or another of {', '.join(names)}."
            )
        return {names[0]: "text"}
    if options.scale == "small" and not options.task_options:
        return {name: SMALL_TASKS[name] for name in names}
    return {name: name for name in names}


def chosen_arms(experiment: Experiment, options: Options) -> tuple[Arm, ...]:
    """The arms to run, in the experiment's order.

    Raises:
        UserError: an arm that is none of the experiment's.
    """
    names = [arm.name for arm in experiment.arms]
    unknown = [name for name in options.arms if name not in names]
    if unknown:
        raise UserError(
            f"--arms={unknown[0]}: the experiment {experiment.name} has {', '.join(names)}."
        )
    return tuple(arm for arm in experiment.arms if not options.arms or arm.name in options.arms)


def run_name(task: str, model: str, arm: Arm, seed: int) -> str:
    """Name of a run and of its folder."""
    # A model of KerasHub's may be named by its address or folder.
    return f"{task}-{re.sub('[/:]+', '_', model)}-{arm.name}-seed{seed}"


def plan(
    experiment: Experiment, options: Options, get_task: Callable[[str], Task], vocab_size: Mapping
) -> list[Run]:
    """All runs of the grid, seed after seed.

    Args:
        experiment: at the scale of `options`.
        options: `Options`.
        get_task: task's name -> `Task`.
        vocab_size: task's name -> number of subwords, where it is known already.

    Raises:
        UserError: see `chosen_tasks` and `chosen_arms`; k is the number of subwords of a pretrained
            model, which nothing says.
    """
    seeds = tuple(options.seeds) or tuple(range(1, experiment.seeds + 1))
    runs = []
    for seed in seeds:
        for stands_for, task in chosen_tasks(experiment, options).items():
            steps = options.settings.get("train_steps", experiment.steps[stands_for])
            common = {**experiment.settings, "model": experiment.model}
            if options.scale == "small":
                common |= SMALL_TEXT if task == "text" else {}
                # Averages are over the last quarter.
                common |= {"checkpoint_every": max(1, steps // 20), "eval_every": -(-steps // 4)}
            common |= options.settings
            defaults = {**get_task(task).defaults, **common}
            size = vocab_size.get(task) or defaults["vocab_size"]
            for arm in chosen_arms(experiment, options):
                if arm.top_k == ALL and "init_from" in common and "vocab_size" not in common:
                    raise UserError(
                        f"--experiment={experiment.name}: {arm.name} needs the number of subwords "
                        f"of --init_from={common['init_from']}. Add --vocab_size."
                    )
                settings = {**common, **arm.settings(steps, size), "seed": seed}
                if arm.shared:
                    # There is nothing to initialize.
                    settings.pop("clone_init", None)
                name = run_name(task, common["model"], arm, seed)
                runs.append(Run(name, task, arm, seed, settings))
    return runs

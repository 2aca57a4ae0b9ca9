"""Figures of a report: beam-width curves and loss curves, as matplotlib figures."""

import collections
import math
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from tf_teaforn.experiments.tables import METRIC_NAMES, Grid, task_title

# The paper's, which those who see fewer colors can tell apart too (Paul Tol's).
_COLORS = ("#332288", "#117733", "#88CCEE", "#DDCC77", "#CC6677", "#882255", "#44AA99", "#999933")
_MARKERS = "sovD^<>p"
# Curves farther apart than this get an axis each.
_FAR = 5.0


def figures(grid: Grid) -> dict[str, Figure]:
    """{file name without suffix: figure} of an experiment."""
    found = {}
    for task in grid.tasks:
        if "curves" in grid.experiment.layouts:
            for group, arms in grid.groups().items():
                figure = _beam_curves(grid, task, group, arms)
                if figure:
                    name = "-".join(filter(None, (grid.experiment.name, task, group, "beams")))
                    found[name.lower()] = figure
        figure = _loss_curves(grid, task)
        if figure:
            found[f"{grid.experiment.name}-{task}-losses"] = figure
    return found


def _beam_curves(grid, task, group, arms):
    """Score by beam width: ours solid, with standard errors; the paper's dashed."""
    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    axes = figure.add_subplot()
    widths = grid.experiment.beam_sizes
    ours, theirs = {}, {}
    for arm in arms:
        numbers = {k: grid.number(task, arm, k) for k in widths}
        ours[arm] = {k: number for k, number in numbers.items() if number}
        metric = next((n.place[-1] for n in ours[arm].values()), "bleu")
        reported = {k: grid.reported(task, arm, k, metric) for k in range(1, 9)}
        theirs[arm] = {k: score.mean for k, score in reported.items() if score}
    if not any(ours.values()):
        return None
    means = [n.mean for numbers in ours.values() for n in numbers.values()]
    reported = [score for scores in theirs.values() for score in scores.values()]
    apart = bool(reported) and (
        min(reported) > max(means) + _FAR or max(reported) < min(means) - _FAR
    )
    other = axes.twinx() if apart else axes
    shift = (len(arms) - 1) / 2
    for index, arm in enumerate(arms):
        style = {"color": _COLORS[index % len(_COLORS)], "marker": _MARKERS[index % len(_MARKERS)]}
        if ours[arm]:
            # Side by side, so that error bars can be told apart.
            places = [k + 0.03 * (index - shift) for k in ours[arm]]
            axes.errorbar(
                places,
                [number.mean for number in ours[arm].values()],
                yerr=[_error(number) for number in ours[arm].values()],
                **style,
                linewidth=1.8,
                markersize=4.5,
                capsize=2.5,
            )
        if theirs[arm]:
            other.plot(
                list(theirs[arm]),
                list(theirs[arm].values()),
                **style,
                linestyle="--",
                linewidth=1.0,
                markersize=3,
                alpha=0.75,
                markerfacecolor="none",
            )
    metric = next(n.place[-1] for numbers in ours.values() for n in numbers.values())
    axes.set_ylabel(METRIC_NAMES.get(metric, metric))
    axes.set_xlabel("beam width k")
    axes.set_xticks(sorted({*widths, *(k for scores in theirs.values() for k in scores)}))
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_title(" · ".join(filter(None, (task_title(grid, task), group))), fontsize=11)
    if apart:
        other.set_ylabel("the paper's (dashed)")
        _same_span(axes, other)
    handles = [
        Line2D(
            [],
            [],
            color=_COLORS[index % len(_COLORS)],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=4.5,
            label=arm.label,
        )
        for index, arm in enumerate(arms)
        if ours[arm] or theirs[arm]
    ]
    alone = all(n.error is None for numbers in ours.values() for n in numbers.values())
    label = "ours: one seed" if alone else "ours: mean ± SE"
    handles.append(Line2D([], [], color="#555555", label=label))
    if reported:
        handles.append(Line2D([], [], color="#555555", linestyle="--", label="the paper's"))
    figure.legend(handles=handles, loc="outside right center", fontsize=8, frameon=False)
    return figure


def _error(number):
    """The standard error, or what draws none."""
    return math.nan if number.error is None else number.error


def _same_span(first, second):
    """Gives two axes the same number of points to the centimetre, so that slopes compare."""
    limits = [axes.get_ylim() for axes in (first, second)]
    span = max(high - low for low, high in limits)
    for axes, (low, high) in zip((first, second), limits, strict=True):
        middle = (low + high) / 2
        axes.set_ylim(middle - span / 2, middle + span / 2)


def _loss_curves(grid, task):
    """A panel an arm: training loss of every stage, and validation loss of stage 0."""
    curves = {arm: _mean_curves(grid, task, arm) for arm in grid.experiment.arms}
    curves = {arm: found for arm, found in curves.items() if found}
    if not curves:
        return None
    columns = min(4, len(curves))
    rows = -(-len(curves) // columns)
    # Not so wide that a single panel would be all of a page.
    figure = Figure(figsize=(max(4.2, 2.9 * columns), 0.6 + 2.4 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for panel, (arm, found) in zip(panels, curves.items(), strict=False):
        for (kind, stage), points in found.items():
            panel.plot(
                list(points),
                list(points.values()),
                color="#555555" if kind == "validation" else _COLORS[stage % len(_COLORS)],
                linestyle=":" if kind == "validation" else "-",
                marker="." if kind == "validation" or len(points) < 3 else None,
                linewidth=1.3,
                label="validation, stage 0" if kind == "validation" else f"stage {stage}",
            )
        panel.set_title(arm.label, fontsize=8.5)
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.xaxis.set_major_locator(MaxNLocator(4))
        panel.tick_params(labelsize=8)
    for panel in panels[len(curves) :]:
        panel.set_visible(False)
    for column in range(columns):
        lowest = panels[column : len(curves) : columns][-1]
        lowest.set_xlabel("step", fontsize=8.5)
        lowest.tick_params(labelbottom=True)
    handles = {
        label: handle
        for panel in figure.axes
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=5, fontsize=8,
        frameon=False,
    )  # fmt: skip
    figure.supylabel("loss / stage-0 token", fontsize=9)
    alone = all(len(grid.of(task, arm)) == 1 for arm in curves)
    what = "one seed" if alone else "mean over seeds"
    figure.suptitle(f"{task_title(grid, task)}\nloss by stage, {what}", fontsize=10.5)
    return figure


def _mean_curves(grid, task, arm) -> Mapping[tuple[str, int], Mapping[int, float]]:
    """{(kind, stage): {step: mean over all runs}}, for the steps that all runs span."""
    found = collections.defaultdict(list)
    for run in grid.of(task, arm).values():
        for kind, curves in run.get("curves", {}).items():
            for stage in range(arm.n if kind == "train" else 1):
                if curve := curves.get(f"loss_{stage}"):
                    found[kind, stage].append(dict(curve))
    means = {key: _mean_curve(curves) for key, curves in found.items()}
    return {key: curve for key, curve in means.items() if curve}


def _mean_curve(curves):
    """{step: mean}, at the steps of the curve that has the fewest.

    Runs of unlike length are thinned by unlike strides: at a step that only some of them have,
    these alone would pass for the mean.
    """
    first, last = max(map(min, curves)), min(map(max, curves))
    spanned = [[step for step in curve if first <= step <= last] for curve in curves]
    steps = min(spanned, key=len)
    values = [np.interp(steps, list(curve), list(curve.values())) for curve in curves]
    return dict(zip(steps, np.mean(values, axis=0).tolist(), strict=True))

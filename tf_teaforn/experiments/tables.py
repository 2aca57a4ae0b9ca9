"""Tables as the paper prints them, from a results file; every number knows where it comes from."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tf_teaforn.experiments import paper
from tf_teaforn.experiments.catalog import Arm, Experiment, Score, short
from tf_teaforn.experiments.records import place
from tf_teaforn.experiments.results import runs_of
from tf_teaforn.experiments.statistics import difference, mean_and_error

_TITLES = {
    "wmt14_ende": "English-German",
    "wmt14_enfr": "English-French",
    "cnn_dailymail": "CNN/DailyMail",
    "gigaword": "Gigaword",
}
METRIC_NAMES = {
    "bleu": "BLEU",
    "bleu_lc": "BLEU, lower case",
    "chrf": "chrF",
    "ter": "TER",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "rougeLsum": "ROUGE-Lsum",
    "exact_match": "exact match",
}
_HEADLINES = ("bleu", "rougeL")


@dataclasses.dataclass(frozen=True)
class Number:
    """A mean over seeds.

    Attributes:
        mean, error: over seeds; the error is None for one seed.
        values: of each seed.
        planned: how many seeds there should be.
        runs: their names.
        commands: how each was scored.
        signatures: of the metric; one, if all is well.
        references: SHA-256 of the references; one, if all is well.
        reported: the paper's.
        place: (task, arm's name, role, checkpoint, beam width, metric).
    """

    mean: float
    error: float | None
    values: tuple[float, ...]
    planned: int
    runs: tuple[str, ...]
    commands: tuple[str, ...]
    signatures: tuple[str, ...]
    references: tuple[str, ...]
    reported: Score | None
    place: tuple[str, str, str, str, int, str]

    @property
    def names(self) -> str:
        """Of its runs, in short."""
        return runs_in_short(self.runs)

    @property
    def mark(self) -> str:
        """What is wrong with its seeds, in a sign: too few, or only one."""
        return "†" if len(self.values) == 1 else "*" if len(self.values) < self.planned else ""


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of texts and `Number`s under a header.

    Attributes:
        title, header, rows: what is shown.
        note: how to read it.
        sources: where what is no `Number` comes from, with `...` around names.
        measured: `Number`s behind cells that are text.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    note: str = ""
    sources: str = ""
    measured: tuple[Number, ...] = ()


def runs_in_short(names: Iterable[str]) -> str:
    """By arm: "demo_enfr-transformer_tiny-n1, seeds 1, 2; …-n2, seeds 1"."""
    seeds = collections.defaultdict(list)
    for name in names:
        arm, _, seed = name.rpartition("-seed")
        seeds[arm].append(int(seed))
    return "; ".join(f"{arm}, seeds {listed(found)}" for arm, found in sorted(seeds.items()))


def listed(numbers: Iterable[int]) -> str:
    """In order: "1, 2"."""
    return ", ".join(map(str, sorted(numbers)))


class Grid:
    """What a results file has of an experiment.

    Args:
        experiment: at the scale that was run.
        results: contents of the file.
    """

    def __init__(self, experiment: Experiment, results: Mapping[str, Any]):
        self.experiment = experiment
        self.about = results["experiments"][experiment.name]
        seeds, tasks = set(self.about["seeds"]), self.about["tasks"]
        self.planned = max(len(seeds), experiment.seeds)
        arms = [arm.name for arm in experiment.arms]
        runs = {
            name: run
            for name, run in runs_of(self.about, arms, results["runs"]).items()
            if run["seed"] in seeds
        }
        # The file has them in the order in which they began.
        ours = list(tasks.values())
        self.runs = {
            name: runs[name]
            for *_, name in sorted(
                (ours.index(run["task"]), run["seed"], arms.index(run["arm"]), name)
                for name, run in runs.items()
            )
        }
        self.tasks = tuple(tasks)

    def of(self, task: str, arm: Arm) -> dict[str, Mapping[str, Any]]:
        """{name: run} of the seeds of an arm."""
        return {
            name: run
            for name, run in sorted(self.runs.items(), key=lambda item: item[1]["seed"])
            if run["task"] == self.about["tasks"][task] and run["arm"] == arm.name
        }

    def number(self, task, arm, k, metric=None, role="test", spec=None) -> Number | None:
        """The mean over seeds, or None where nothing was scored."""
        spec = spec or self.about["checkpoints"][0]
        found = {}
        for name, run in self.of(task, arm).items():
            for evaluation in run.get("evaluations", []):
                if place(evaluation) == (role, spec, k):
                    found[name] = evaluation
        metric = metric or self.headline(found.values())
        found = {name: e for name, e in found.items() if metric in e["metrics"]}
        if not found:
            return None
        where = (task, arm.name, role, spec, k, metric)
        values = tuple(e["metrics"][metric] for e in found.values())
        return Number(
            *mean_and_error(values),
            values=values,
            planned=self.planned,
            runs=tuple(found),
            commands=tuple(e["command"] for e in found.values()),
            signatures=tuple(dict.fromkeys(e["signature"][metric] for e in found.values())),
            references=tuple(dict.fromkeys(e["references_sha256"] for e in found.values())),
            reported=self.reported(task, arm, k, metric, role, spec),
            place=where,
        )

    def reported(self, task, arm, k, metric, role="test", spec=None) -> Score | None:
        """The paper's number; at small scale ROUGE and BLEU stand for each other nowhere."""
        if spec not in (None, self.about["checkpoints"][0]):
            return None
        return self.experiment.reported.get((task, role, arm.name, k, metric))

    @staticmethod
    def headline(evaluations) -> str | None:
        """The metric that tables show: BLEU or else ROUGE-L."""
        for evaluation in evaluations:
            for name in (*_HEADLINES, *evaluation["metrics"]):
                if name in evaluation["metrics"]:
                    return name
        return None

    def metrics(self, spec: str | None = None) -> list[str]:
        """All that was computed of a checkpoint, or of all the experiment's, in order.

        Another experiment in the folder may have scored the same runs at others.
        """
        specs = self.about["checkpoints"] if spec is None else (spec,)
        names = {
            name: None
            for run in self.runs.values()
            for evaluation in run.get("evaluations", [])
            if evaluation["checkpoint_flag"] in specs
            for name in evaluation["metrics"]
        }
        return list(names)

    def groups(self) -> dict[str, tuple[Arm, ...]]:
        """Arms to be shown together: in a grid over N and λ, those of one N with the first."""
        arms = self.experiment.arms
        depths = sorted({arm.n for arm in arms if arm.n > 1})
        if len(arms) <= 6 or len(depths) < 2:
            return {"": arms}
        return {f"TeaFor{n}": (arms[0], *(arm for arm in arms if arm.n == n)) for n in depths}


def task_title(grid: Grid, task: str) -> str:
    """The task's language pair or name, and what stood for it."""
    actual = grid.about["tasks"][task]
    data = actual
    if actual == "text":
        files = grid.about.get("files", {})
        data = files.get("test_files") or files.get("train_files", actual)
    if actual == task:
        return _TITLES.get(task, data)
    return f"{_TITLES.get(task, task)} ({data} stands for it)"


def tables(grid: Grid) -> list[Table]:
    """All tables of an experiment, in the report's order."""
    found = []
    for layout in grid.experiment.layouts:
        if layout in _LAYOUTS:
            found += _LAYOUTS[layout](grid)
    found += [*_other_metrics(grid), *_differences(grid), *cost(grid)]
    return [table for table in found if table.rows]


def _shared(grid: Grid) -> list[Table]:
    """Table 1."""
    teacher, own, shared = grid.experiment.arms
    rows = []
    for task in grid.tasks:
        for label, arm in (("N", own), ("Y", shared)):
            cells = [
                grid.number(task, each, k)
                for k in grid.experiment.beam_sizes
                for each in (teacher, arm)
            ]
            rows.append((task_title(grid, task), label, *cells))
    header = ["", "θ shared"]
    for k in grid.experiment.beam_sizes:
        name = "greedy" if k == 1 else f"beam k = {k}"
        header += [f"Teacher forcing, {name}", f"TeaFor2, {name}"]
    return [Table("Shared and own decoders", tuple(header), tuple(rows))]


def _beams(grid: Grid) -> list[Table]:
    """The appendix: a row a beam width, a column an arm."""
    found = []
    for task in grid.tasks:
        for spec in grid.about["checkpoints"]:
            computed = grid.metrics(spec)
            metrics = [name for name in computed if name.startswith("rouge")]
            # The headline too where another experiment in the folder asked for ROUGE.
            if not metrics or "bleu" in computed:
                metrics = [None, *metrics]
            for role in grid.experiment.sets:
                for metric in metrics:
                    for group, arms in grid.groups().items():
                        found.append(_beam_table(grid, task, spec, role, metric, group, arms))
    return found


def _beam_table(grid, task, spec, role, metric, group, arms):
    rows = []
    for k in grid.experiment.beam_sizes:
        numbers = [grid.number(task, arm, k, metric, role, spec) for arm in arms]
        if any(numbers):
            rows.append((str(k), *numbers))
    shown = next((n.place[-1] for row in rows for n in row[1:] if n), metric)
    set_name = grid.experiment.sets[role].partition("=")[2]
    title = f"{METRIC_NAMES.get(shown, shown)} by beam width: {task_title(grid, task)}, {set_name}"
    title += f", {group}" if group else ""
    return Table(f"{title}, {spec}", ("k", *(arm.label for arm in arms)), tuple(rows))


def _chosen(grid: Grid) -> list[Table]:
    """Table 3: λ chosen on the development set, by task and N."""
    k = max(grid.experiment.beam_sizes)
    depths = sorted({arm.n for arm in grid.experiment.arms})
    rows, missing = [], []
    for index, n in enumerate(depths):
        arms = [arm for arm in grid.experiment.arms if arm.n == n]
        name = "Teacher forcing" if n == 1 else f"TeaFor{n}"
        row: list[Any] = [name]
        for task in grid.tasks:
            scores = {arm: grid.number(task, arm, k, role="dev") for arm in arms}
            means = {
                arm: score.mean
                for arm, score in scores.items()
                if score and len(score.values) == len(grid.about["seeds"])
            }
            # The best of a few, or of unlike numbers of seeds, would pass for the best of all.
            whole = n == 1 or len(means) == len(arms)
            if not whole:
                missing.append(f"{name}, {task_title(grid, task)}: {len(means)} of {len(arms)}")
            chosen = max(arms, key=means.get) if whole else None
            number = grid.number(task, chosen, k) if chosen else None
            mean, error, discount = paper.CHOSEN[task][index]
            if number:
                number = dataclasses.replace(number, reported=Score(mean, error))
            ours = f"{short(chosen.discount)}" if chosen and n > 1 else "-"
            theirs = "-" if discount is None else short(discount)
            row += [number, f"{ours} (paper {theirs})"]
        rows.append(tuple(row))
    for peer, scores in paper.TRANSLATION_PEERS.items():
        row = [f"{peer} (paper)"]
        for task in grid.tasks:
            row += [_as_printed(scores.get(task), 1), "-"]
        rows.append(tuple(row))
    header = [""]
    for task in grid.tasks:
        header += [task_title(grid, task), "λ"]
    note = (
        "λ is the one with the highest mean on the development set, chosen once all have a score "
        "of every seed there."
    )
    note += f" So far: {'; '.join(missing)}." if missing else ""
    return [Table(f"λ chosen on the development set, beam {k}", tuple(header), tuple(rows), note)]


def _compute(grid: Grid) -> list[Table]:
    """Table 4: as many steps, 1.5 times as many, and TeaFor2."""
    teacher, longer, teafor = grid.experiment.arms
    rows = []
    for task in grid.tasks:
        scores = {k: grid.number(task, teacher, k) for k in grid.experiment.beam_sizes}
        scored = [k for k, number in scores.items() if number and k > 1]
        best = max(scored, key=lambda k: scores[k].mean, default=None)
        for index, (label, k) in enumerate((("greedy", 1), (f"beam (best k: {best})", best))):
            cells = []
            for column, arm in enumerate((teacher, longer, teafor)):
                number = grid.number(task, arm, k) if k else None
                if number and column < 2:
                    score = Score(*paper.COMPUTE[task][index][column])
                    number = dataclasses.replace(number, reported=score)
                elif number and index:
                    # Theirs at our best k has no place beside what they have at theirs.
                    number = dataclasses.replace(number, reported=None)
                cells.append(number)
            rows.append((task_title(grid, task), label, *cells))
    header = ("", "", "1x steps", "1.5x steps", "TeaFor2, 1x steps")
    return [Table("Equal compute", header, tuple(rows))]


def _summaries(grid: Grid) -> list[Table]:
    """Table 5: ROUGE of all tasks, a row an arm and beam width."""
    columns = [
        (task, metric)
        for task in grid.tasks
        for metric in dict.fromkeys(k[-1] for k in grid.experiment.reported if k[0] == task)
    ]
    # What runs of translations that stand for summaries are compared by.
    columns += [(task, "bleu") for task in grid.tasks if "bleu" in grid.metrics()]
    rows = []
    for arm in grid.experiment.arms:
        for k in grid.experiment.beam_sizes:
            numbers = [grid.number(task, arm, k, metric) for task, metric in columns]
            if any(numbers):
                name = "greedy" if k == 1 else f"beam {k}"
                rows.append((f"{arm.label}, {name}", *numbers))
    if rows:
        for peer, scores in paper.SUMMARY_PEERS.items():
            cells = [
                _as_printed(value, 2)
                for task in grid.tasks
                for value in scores.get(task, (None, None, None))
            ]
            others = ["-"] * (len(columns) - len(cells))
            rows.append((f"{peer} (paper)", *cells, *others))
    header = [f"{task_title(grid, task)}: {METRIC_NAMES[metric]}" for task, metric in columns]
    return [Table("Summaries", ("", *header), tuple(rows))]


def _as_printed(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def _other_metrics(grid: Grid) -> list[Table]:
    """Every metric at one width, a row an arm."""
    metrics = [name for name in grid.metrics() if not name.startswith("rouge")]
    if len(metrics) < 2 or not grid.experiment.beam_sizes:
        return []
    widths = grid.experiment.beam_sizes
    k = 4 if 4 in widths else max(widths)
    found = []
    for task in grid.tasks:
        rows = []
        for arm in grid.experiment.arms:
            numbers = [grid.number(task, arm, k, metric) for metric in metrics]
            if any(numbers):
                rows.append((arm.label, *numbers))
        title = f"All metrics, beam {k}: {task_title(grid, task)}"
        header = ("", *(METRIC_NAMES.get(name, name) for name in metrics))
        found.append(Table(title, header, tuple(rows), "TER: less is better."))
    return found


def _differences(grid: Grid) -> list[Table]:
    """Every arm against the first: over seeds, and over sentences."""
    baseline, *others = grid.experiment.arms
    found = []
    for task in grid.tasks:
        rows, against, compared, signatures = [], {}, {}, {}
        metric = _compared(grid, task)
        for arm in others:
            for k in grid.experiment.beam_sizes:
                pair = [grid.number(task, each, k, metric) for each in (baseline, arm)]
                if not all(pair):
                    continue
                change = difference(pair[0].values, pair[1].values)
                cells = ["too few seeds"] * 3
                if change:
                    cells = [
                        f"{change.mean:+.2f} ± {change.error:.2f}",
                        f"{change.low:+.2f} to {change.high:+.2f}",
                        f"{change.detectable:.2f}",
                    ]
                seeds = " and ".join(str(len(number.values)) for number in pair[::-1])
                tests = list(_tests(grid, task, arm, k))
                rows.append(
                    (arm.label, str(k), seeds, *cells, "; ".join(map(_p_value, tests)) or "-")
                )
                against[pair[0].names] = compared[pair[1].names] = None
                signatures |= {found["signature"]: None for _, found in tests}
        found.append(
            Table(
                f"Against {baseline.label.lower()}: {METRIC_NAMES.get(metric, metric)}, "
                f"{task_title(grid, task)}",
                (
                    "",
                    "k",
                    "seeds",
                    "difference ± SE over seeds",
                    "95% interval",
                    "smallest effect shown",
                    "p by seed",
                ),
                tuple(rows),
                "Interval: Student's t, pooled variance. Smallest effect shown: the true "
                "difference that as many seeds with this spread would have found at the 5% level "
                "four times in five. p: paired bootstrap over sentences (1,000 resamples) "
                "between the runs of each seed; it knows nothing of other seeds. For every metric "
                "it is sacreBLEU's estimate, in effect one-sided: double it for a two-sided test. "
                "Seeds: of the row, and of what it is compared with.",
                f"Runs: {_code(compared)}; compared with {_code(against)}."
                + (f" Bootstrap: {_code(signatures)}." if signatures else ""),
            )
        )
    return found


def _compared(grid, task):
    """The metric of the comparisons of a task, or else the one that tables show."""
    runs = [run for run in grid.runs.values() if run["task"] == grid.about["tasks"][task]]
    compared = [found["metric"] for run in runs for found in run.get("comparisons", [])]
    return next(iter(compared), grid.headline(e for r in runs for e in r.get("evaluations", [])))


def _tests(grid, task, arm, k):
    """[(seed, comparison)] on the test set."""
    for run in grid.of(task, arm).values():
        for found in run.get("comparisons", []):
            if (found["role"], found["beam_size"]) == ("test", k):
                yield run["seed"], found


def _p_value(test):
    seed, found = test
    change = found["system"] - found["baseline"]
    p = f"{found['p_value']:.3f}" if found["p_value"] >= 0.001 else "< .001"
    return f"seed {seed}: {p} ({change:+.2f})"


def _code(texts):
    return "; ".join(f"`{text}`" for text in texts)


def cost(grid: Grid) -> list[Table]:
    """Table 6: steps a second and memory by N, of shared decoders that read hidden states."""
    rows: list[tuple] = []
    shown = set()
    measured_runs = []
    numbers = []
    for task in grid.tasks:
        teacher: dict[str, float] = {}
        for arm in grid.experiment.arms:
            plain = arm.shared and not arm.top_k and not arm.word_drop and arm.steps == 1
            # Curves come with the end of training.
            runs = {
                name: run
                for name, run in grid.of(task, arm).items()
                if run.get("speed") and "curves" in run
            }
            if not (plain and runs) or (task, arm.n) in shown:
                continue
            shown.add((task, arm.n))
            measured = _speeds(grid, task, arm, runs)
            numbers += measured
            values = {number.place[-1]: number.mean for number in measured}
            if arm.n == 1:
                teacher = values
            measured_runs.append(runs_in_short(runs))
            layers, steps, memory = paper.COST.get(arm.n, (None, None, None))
            cells = [_ratio(values, teacher, name, scale) for name, scale in _COST]
            reported = (
                str(layers) if layers else "-",
                f"{steps:g} ({steps / paper.COST[1][1]:.2f}x)" if steps else "-",
                f"{memory:g} ({memory / paper.COST[1][2]:.2f}x)" if memory else "-",
            )
            rows.append((task, arm.label, *cells, *reported, str(len(runs))))
    rows = [(task_title(grid, task), *rest) for task, *rest in rows]
    header = (
        "",
        "",
        "steps/s",
        "device GB",
        "host GB",
        "paper: decoder layers",
        "paper: steps/s",
        "paper: device GB",
        "runs",
    )
    note = (
        "Median over log windows, mean over runs; validation and checkpoints not counted. The "
        "paper's are PEGASUS large on TPUs. Ratios hold for runs of one machine, each alone on it: "
        "those that shared one slow each other down."
    )
    sources = f"Runs: {_code(measured_runs)}."
    return [Table("Cost of N", header, tuple(rows), note, sources, tuple(numbers))]


def _speeds(grid: Grid, task: str, arm: Arm, runs) -> list[Number]:
    """What was measured while the runs of an arm were trained."""
    _, steps, memory = paper.COST.get(arm.n, (None, None, None))
    reported = {
        "steps_per_second": steps and Score(steps),
        "peak_device_bytes": memory and Score(memory * 1e9),
    }
    found = []
    for name, _ in _COST:
        measured = {run: runs[run]["speed"].get(name) for run in runs}
        measured = {run: value for run, value in measured.items() if value is not None}
        if measured:
            found.append(
                Number(
                    *mean_and_error(tuple(measured.values())),
                    values=tuple(measured.values()),
                    planned=grid.planned,
                    runs=tuple(measured),
                    commands=tuple(runs[run]["command"] for run in measured),
                    signatures=(),
                    references=(),
                    reported=reported.get(name),
                    place=(task, arm.name, "training", "", 0, name),
                )
            )
    return found


_COST = (("steps_per_second", 1.0), ("peak_device_bytes", 1e-9), ("peak_host_bytes", 1e-9))


def _ratio(values, teacher, name, scale):
    if name not in values:
        return "-"
    ratio = f" ({values[name] / teacher[name]:.2f}x)" if name in teacher else ""
    return f"{values[name] * scale:.3g}{ratio}"


_LAYOUTS = {
    "shared": _shared,
    "beams": _beams,
    "chosen": _chosen,
    "compute": _compute,
    "summaries": _summaries,
}


def numbers_of(found: Sequence[Table]) -> list[Number]:
    """Every number of the tables once, in order."""
    listed = {
        (cell.place, cell.reported): cell
        for table in found
        for row in table.rows
        for cell in row
        if isinstance(cell, Number)
    }
    return list(listed.values())

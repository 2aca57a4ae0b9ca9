"""A report from results files: HTML in one file, Markdown, CSV, figures as PNG and SVG."""

import base64
import collections
import csv
import dataclasses
import html
import io
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from tf_teaforn.errors import UserError
from tf_teaforn.experiments.catalog import Score, experiment_names, get_experiment
from tf_teaforn.experiments.parts import join
from tf_teaforn.experiments.plan import scaled
from tf_teaforn.experiments.plots import figures
from tf_teaforn.experiments.results import has_result, read
from tf_teaforn.experiments.same_run import beside_the_method, differences, other_alphas
from tf_teaforn.experiments.tables import (
    METRIC_NAMES,
    Grid,
    Number,
    Table,
    listed,
    numbers_of,
    runs_in_short,
    tables,
    task_title,
)

_MARKS = "* fewer seeds than planned; † one seed, no standard error."
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
       color: #1a1a1a; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.3rem; margin-top: 2.5rem; border-top: 1px solid #ccc;
     padding-top: 1rem; } h3 { font-size: 1.02rem; margin: 1.8rem 0 .4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
th, td { padding: .25rem .7rem; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 1px solid #333; border-top: 2px solid #333; vertical-align: bottom; }
tbody tr:last-child td { border-bottom: 2px solid #333; }
.paper { color: #767676; font-size: .8rem; white-space: nowrap; } .ours { white-space: nowrap; }
a.source { color: #2a5db0; text-decoration: none; font-size: .68rem; vertical-align: super; }
.note { color: #555; font-size: .85rem; max-width: 52rem; }
img { max-width: 100%; } code { font-size: .78rem; overflow-wrap: anywhere; }
details { margin: 1rem 0; } td.command { text-align: left; }
"""


@dataclasses.dataclass(frozen=True)
class Section:
    """An experiment of a results file, ready to be printed."""

    title: str
    grid: Grid
    tables: tuple[Table, ...]
    figures: Mapping[str, Figure]


def sections(paths: Sequence[str]) -> list[Section]:
    """One section an experiment; results files that are parts of one grid make one (`join`).

    Raises:
        UserError: no such file, or one without an experiment.
    """
    files = []
    for path in paths:
        if not Path(path).exists():
            raise UserError(f"--results={path}: there is no such file.")
        files.append((path, read(path)))
    joined = join(files)
    found = []
    for part in joined:
        for name, about in part.results["experiments"].items():
            if name not in experiment_names():
                raise UserError(
                    f"--results={','.join(part.paths)}: this version has no experiment {name}, but "
                    f"{', '.join(experiment_names())}."
                )
            experiment = scaled(get_experiment(name), about["scale"])
            grid = Grid(experiment, part.results)
            title = experiment.title
            if len(joined) > 1:
                folders = [Path(path).resolve().parent.name for path in part.paths]
                title += f" ({', '.join(folders)})"
            found.append(Section(title, grid, tuple(tables(grid)), figures(grid)))
    if not found:
        raise UserError(f"--results={','.join(map(str, paths))}: there is no experiment in it yet.")
    return found


def write_report(paths: Sequence[str], output_dir: str) -> list[Path]:
    """Writes report.html, report.md, numbers.csv and figures/; returns the files."""
    found = sections(paths)
    folder = Path(output_dir)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    drawn: dict[tuple[int, str], tuple[str, bytes]] = {}
    written = []
    for index, section in enumerate(found):
        for name, figure in section.figures.items():
            stem = name if len(found) == 1 else f"{index + 1}-{name}"
            for suffix in ("png", "svg"):
                path = folder / "figures" / f"{stem}.{suffix}"
                # The same results make the same bytes.
                with matplotlib.rc_context({"svg.hashsalt": stem}):
                    date = {"Date": None} if suffix == "svg" else None
                    figure.savefig(path, dpi=160, metadata=date)
                written.append(path)
            drawn[index, name] = (f"figures/{stem}.png", path.read_bytes())
    sources = _Sources(found)
    for name, text in (
        ("report.html", _html(found, drawn, sources)),
        ("report.md", _markdown(found, drawn, sources)),
        ("numbers.csv", _csv(found)),
    ):
        (folder / name).write_text(text, encoding="utf-8")
        written.append(folder / name)
    return written


def score(number: Number) -> str:
    """As the paper prints it: "27.16 ± .02"."""
    error = "" if number.error is None else f" ± {_two(number.error)}"
    return f"{number.mean:.2f}{error}{number.mark}"


def reported(number: Number) -> str:
    """The paper's own, or nothing."""
    if number.reported is None:
        return ""
    error = number.reported.error
    return f"{number.reported.mean:.2f}" + ("" if error is None else f" ± {_two(error)}")


def _two(value):
    return f"{value:.2f}".removeprefix("0")


class _Sources:
    """Numbers every evaluation that a number was read from."""

    def __init__(self, found):
        self.entries: list[tuple[int, Number]] = []
        self._index: dict[tuple, int] = {}
        for section_index, section in enumerate(found):
            for number in numbers_of(section.tables):
                key = (section_index, *number.place)
                if key not in self._index:
                    self._index[key] = len(self.entries) + 1
                    self.entries.append((section_index, number))

    def __call__(self, section_index, number):
        return self._index[(section_index, *number.place)]

    def of(self, section_index):
        """[(its number, `Number`)] of a section."""
        return [
            (index, number)
            for index, (where, number) in enumerate(self.entries, start=1)
            if where == section_index
        ]


def _facts(section: Section) -> list[str]:
    grid, about = section.grid, section.grid.about
    runs = list(grid.runs.values())
    done = [run for run in runs if run.get("status") == "done"]
    facts = [
        f"{len(done)} of {len(grid.experiment.arms) * grid.planned * len(grid.tasks)} runs "
        f"are done; seeds {', '.join(map(str, about['seeds']))} of {grid.planned}; scale: "
        f"{about['scale']}; model {about['model']}; "
        f"steps {', '.join(map(str, sorted({run['train_steps'] for run in runs})))}.",
        *(f"Sweep: `{command}`" for command in about["commands"]),
    ]
    facts += [
        f"{name} failed: {run['error']}" for name, run in grid.runs.items() if run.get("error")
    ]
    return [*facts, *_unequal(grid), *grid.experiment.notes, *_warnings(grid.runs)]


def _unequal(grid: Grid) -> list[str]:
    """Lines for what makes arms, or runs, differ in more than the method."""
    lines = []
    for task in grid.tasks:
        first = None
        references = collections.defaultdict(list)
        for arm in grid.experiment.arms:
            found = {name: run for name, run in grid.of(task, arm).items() if has_result(run)}
            for name, run in found.items():
                for role, digest in {(e["role"], e["references_sha256"]) for e in _scores(run)}:
                    references[role, digest].append(name)
            if not found:
                continue
            one = arm, next(iter(found.values()))
            first = first or one
            if unequal := _more_than_the_method(first, one, grid.about["checkpoints"]):
                lines.append(
                    f"{arm.label} differs from {first[0].label} in more than the method, "
                    f"{task_title(grid, task)}: {'; '.join(unequal)}."
                )
        roles = collections.Counter(role for role, _ in references)
        lines += [
            f"{role} set: scored on references of SHA-256 {digest}: {runs_in_short(names)}; others "
            "on other ones."
            for (role, digest), names in references.items()
            if roles[role] > 1
        ]
    return lines


def _more_than_the_method(one, other, checkpoints):
    """Lines for settings in which two (arm, run) differ."""
    try:
        configs = [beside_the_method(run, arm.steps) for arm, run in (one, other)]
    except UserError as error:
        return [f"what they were trained with is not known here ({error})"]
    own = ("--shared:", "--clone_init:")
    lines = [line for line in differences(*configs, checkpoints) if not line.startswith(own)]
    return lines + other_alphas(one[1], other[1])


def _scores(run):
    return run.get("evaluations", ())


def _warnings(runs: Mapping[str, Any]) -> list[str]:
    """A line for each warning of a set, with the runs and beam widths that have it."""
    scored = collections.defaultdict(set)
    warned = collections.defaultdict(set)
    for name, run in runs.items():
        for evaluation in run.get("evaluations", []):
            of_set = (run["task"], evaluation["split"])
            place = (name, evaluation["beam_size"])
            scored[of_set].add(place)
            for warning in evaluation.get("warnings", []):
                warned[*of_set, warning].add(place)
    return [
        f"{task}, {split}: {warning} ({_where(places, scored[task, split])})"
        for (task, split, warning), places in sorted(warned.items())
    ]


def _where(places: Set[tuple[str, int]], scored: Set[tuple[str, int]]) -> str:
    """Which (run, beam width) of those scored: "…-n1, seeds 1, 2; …-n2, seeds 1; beam 4"."""
    runs, beams = ({place[i] for place in places} for i in range(2))
    all_runs, all_beams = ({place[i] for place in scored} for i in range(2))
    where = "all runs" if runs == all_runs else runs_in_short(runs)
    return where if beams == all_beams else f"{where}; beam {listed(beams)}"


def _run_rows(section: Section):
    """(header, rows) of the runs."""
    rows = []
    for name, run in section.grid.runs.items():
        seconds = run.get("seconds")
        rows.append(
            (
                name,
                run.get("status", "not scored yet"),
                str(run["train_steps"]),
                "-" if seconds is None else f"{seconds:.0f}",
                run["version"],
                run["command"],
            )
        )
    return ("run", "status", "steps", "seconds", "version", "command"), rows


def _source_cells(number: Number) -> tuple[str, ...]:
    *_, role, spec, k, metric = number.place
    return (
        f"{METRIC_NAMES.get(metric, metric)}, {role}, {spec}, beam {k}",
        number.names,
        number.commands[0],
        " and ".join(number.signatures),
        " and ".join(number.references),
    )


_SOURCE_HEADER = (
    "",
    "scored",
    "runs",
    "command (of the first run)",
    "signature",
    "references, SHA-256",
)


def _html(found, drawn, sources):
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>TeaForN: results</title><style>{_STYLE}</style><h1>TeaForN: results</h1>",
        f"<p class='note'>Mean ± standard error over seeds, above; the paper's, below in grey. "
        f"{_MARKS} Small figures lead to where a number comes from.</p>",
    ]
    for index, section in enumerate(found):
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        parts.append(f"<p>{html.escape(section.grid.experiment.description)}</p><ul class='note'>")
        parts += [f"<li>{_code(fact)}</li>" for fact in _facts(section)]
        parts.append("</ul>")
        for name in section.figures:
            data = base64.b64encode(drawn[index, name][1]).decode()
            parts.append(
                f"<p><img alt='{html.escape(name)}' src='data:image/svg+xml;base64,{data}'></p>"
            )
        for table in section.tables:
            cells = [[_html_cell(c, sources, index) for c in row] for row in table.rows]
            parts.append(f"<h3>{html.escape(table.title)}</h3>{_html_table(table.header, cells)}")
            if table.note:
                parts.append(f"<p class='note'>{html.escape(table.note)}</p>")
            if table.sources:
                parts.append(f"<p class='note'>{_code(table.sources)}</p>")
        header, rows = _run_rows(section)
        commands = [[*map(html.escape, row[:-1]), _code(f"`{row[-1]}`")] for row in rows]
        parts.append(f"<details><summary>Runs</summary>{_html_table(header, commands)}</details>")
        rows = [
            [f"<span id='n{i}'>{i}</span>", *(_code(f"`{c}`") for c in _source_cells(number))]
            for i, number in sources.of(index)
        ]
        parts.append(
            "<details open><summary>Where the numbers come from</summary>"
            f"{_html_table(_SOURCE_HEADER, rows)}</details>"
        )
    return "\n".join(parts) + "\n</html>\n"


def _code(text):
    """Escapes a text, in which `...` is code."""
    pieces = html.escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces))


def _html_table(header, rows):
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td class='command'>{cell}</td>" if cell.startswith("<code>") else f"<td>{cell}</td>"
            for cell in row
        )
        + "</tr>\n"
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class='scroll'>{table}</div>"


def _html_cell(cell: Any, sources, index):
    if cell is None:
        return "-"
    if not isinstance(cell, Number):
        return html.escape(cell)
    i = sources(index, cell)
    tip = html.escape(cell.names, quote=True)
    link = f"<a class='source' href='#n{i}'>{i}</a>"
    text = f"<span class='ours' title='{tip}'>{score(cell)}{link}</span>"
    theirs = reported(cell)
    return f"{text}<br><span class='paper'>{theirs}</span>" if theirs else text


def _markdown(found, drawn, sources):
    parts = [
        "# TeaForN: results",
        "",
        f"Mean ± standard error over seeds; the paper's in brackets. {_MARKS} [n]: where a number "
        "comes from, at the end of its section.",
    ]
    for index, section in enumerate(found):
        parts += ["", f"## {section.title}", "", section.grid.experiment.description, ""]
        parts += [f"- {fact}" for fact in _facts(section)]
        for name in section.figures:
            parts += ["", f"![{name}]({drawn[index, name][0]})"]
        for table in section.tables:
            cells = [[_markdown_cell(c, sources, index) for c in row] for row in table.rows]
            parts += ["", f"### {table.title}", "", *_markdown_table(table.header, cells)]
            parts += [line for text in (table.note, table.sources) if text for line in ("", text)]
        header, rows = _run_rows(section)
        rows = [[*row[:-1], f"`{row[-1]}`"] for row in rows]
        parts += ["", "### Runs", "", *_markdown_table(header, rows)]
        rows = [
            [str(i), *(f"`{cell}`" for cell in _source_cells(number))]
            for i, number in sources.of(index)
        ]
        parts += ["", "### Where the numbers come from", ""]
        parts += _markdown_table(_SOURCE_HEADER, rows)
    return "\n".join(parts) + "\n"


def _markdown_table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines]


def _markdown_cell(cell: Any, sources, index):
    if cell is None:
        return "-"
    if not isinstance(cell, Number):
        return cell
    theirs = reported(cell)
    return f"{score(cell)} [{sources(index, cell)}]" + (f" ({theirs})" if theirs else "")


def _csv(found):
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(
        ["experiment", "title", "table", "task", "trained_on", "arm", "role", "checkpoint"]
        + ["beam_size", "metric", "mean", "standard_error", "seeds", "seeds_planned", "values"]
        + ["paper_mean", "paper_standard_error", "runs", "commands", "signature", "references"]
    )
    for section in found:
        # By the first table that shows it; the paper's may be another in another table.
        shown = {}
        for table in section.tables:
            for number in (*numbers_of([table]), *table.measured):
                shown.setdefault((number.place, number.reported), (table.title, number))
        for title, number in shown.values():
            task, arm, role, spec, k, metric = number.place
            theirs = number.reported or Score("")
            writer.writerow(
                [section.grid.experiment.name, section.title, title, task]
                + [section.grid.about["tasks"][task], arm, role, spec, k or "", metric]
                + [f"{number.mean:.6f}", _optional(number.error), len(number.values)]
                + [number.planned, " ".join(f"{value:.6f}" for value in number.values)]
                + [theirs.mean, "" if theirs.error is None else theirs.error]
                + [" ".join(number.runs), "\n".join(number.commands)]
                + [" and ".join(number.signatures), " and ".join(number.references)]
            )
    return output.getvalue()


def _optional(value):
    return "" if value is None else f"{value:.6f}"

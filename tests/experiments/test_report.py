"""Reports of fixed results files: the numbers, where they come from, what is said of few seeds."""

import csv
import html.parser
import json
import re
import statistics

import pytest
from matplotlib import image

from tf_teaforn.errors import UserError
from tf_teaforn.experiments import catalog, paper
from tf_teaforn.experiments.catalog import Arm, get_experiment
from tf_teaforn.experiments.report import sections, write_report
from tf_teaforn.experiments.tables import tables

SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"


def run(arm, seed, scores, task="demo_ende", role="test", **more):
    """{name: run} of a results file; `scores` is {k: BLEU}."""
    name = f"{task}-transformer_tiny-{arm.name}-seed{seed}"
    evaluations = [
        {
            "metrics": {"bleu": score, "chrf": score + 20, "ter": 50.0},
            "signature": {"bleu": SIGNATURE, "chrf": "chrf's", "ter": "ter's"},
            "beam_size": k,
            "split": "test",
            "references_sha256": "c0ffee",
            "warnings": ["looks tokenised"] if k == 4 and seed == 2 else [],
            "command": f"bin/evaluate --model_dir=runs/{name} --beam_size={k}",
            "role": role,
            "checkpoint_flag": "average:5",
        }
        for k, score in scores.items()
    ]
    comparisons = [
        {"role": "test", "checkpoint_flag": "average:5", "beam_size": k, "metric": "bleu"}
        | {"with": "n1", "baseline": 30.0, "system": 30.25, "p_value": p, "signature": "bs"}
        for k, p in more.get("p_values", {}).items()
    ]
    # Whole eighths, so that means of seeds are exact.
    losses = {f"loss_{s}": [[5, 3 + s + seed / 8], [10, 2 + s + seed / 8]] for s in range(arm.n)}
    return {
        name: {
            "task": task,
            "arm": arm.name,
            "seed": seed,
            "status": more.get("status", "done"),
            "error": more.get("error"),
            "command": f"bin/train --model_dir=runs/{name}",
            "version": "0.1.0",
            "settings": {"model": "transformer_tiny"},
            "train_steps": 10,
            "seconds": 12.0,
            "speed": {"steps_per_second": 6.0 / arm.n, "peak_host_bytes": 1e9 * arm.n},
            "curves": {"train": losses, "validation": {"loss_0": [[10, 2 + seed / 4]]}},
            "evaluations": evaluations,
            "comparisons": comparisons,
        }
    }


def results_file(path, name, runs, beam_sizes, seeds=(1, 2), tasks=None):
    about = {
        "scale": "small",
        "tasks": tasks or {"wmt14_ende": "demo_ende"},
        "model": "transformer_tiny",
        "seeds": list(seeds),
        "beam_sizes": list(beam_sizes),
        "checkpoints": ["average:5"],
        "commands": ["bin/sweep --experiment=base"],
    }
    joined = {key: value for part in runs for key, value in part.items()}
    content = {"format_version": 1, "experiments": {name: about}, "runs": joined}
    path.write_text(json.dumps(content))
    return str(path)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """(folder, section) of two seeds of five, of which one arm has only one."""
    folder = tmp_path_factory.mktemp("report")
    teacher, own, shared = get_experiment("base").arms
    runs = [
        run(teacher, 1, {1: 30.0, 4: 31.0}),
        run(teacher, 2, {1: 30.4, 4: 31.0}),
        run(shared, 1, {1: 30.7, 4: 31.2}, p_values={1: 0.02, 4: 0.0005}),
        run(shared, 2, {1: 31.3, 4: 31.4}, p_values={1: 0.3}),
        run(own, 1, {1: 30.5, 4: 31.1}),
        run(own, 2, {}, status="failed", error="train ended with 1: <b>no memory</b>"),
    ]
    path = results_file(folder / "results.json", "base", runs, (1, 4))
    files = write_report([path], str(folder / "report"))
    assert all(file.stat().st_size for file in files)
    (section,) = sections([path])
    return folder / "report", section


def csv_rows(folder):
    """Rows of numbers.csv."""
    with (folder / "numbers.csv").open(newline="") as file:
        return [*csv.DictReader(file)]


def rows_of(text, title):
    """Cells of the Markdown table under a title."""
    table = re.search(rf"### {re.escape(title)}[^\n]*\n\n(.*?)\n\n", text, re.DOTALL)[1]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.split("\n")]


def test_table_1(report):
    text = (report[0] / "report.md").read_text()
    _, _, own, shared = rows_of(text, "Shared and own decoders")
    # Means 30.2 and 31.0, sample deviations .283 and .424, by the square root of 2.
    name = "English-German (demo_ende stands for it)"
    assert shared == [
        *(name, "Y", "30.20 ± .20* [1] (26.96 ± .04)", "31.00 ± .30* [5] (27.16 ± .02)"),
        *("31.00 ± .00* [3] (27.96 ± .09)", "31.30 ± .10* [6] (27.90 ± .03)"),
    ]
    assert own[2:4] == [shared[2], "30.50† [2] (27.02 ± .06)"]


def test_differences(report):
    text = (report[0] / "report.md").read_text()
    rows = rows_of(text, "Against teacher forcing: BLEU, English-German")
    by_arm = {(row[0].strip(), row[1]): row[2:] for row in rows[2:]}
    # Pooled variance (.08 + .18) / 2, so the error is sqrt(.13): t(.975, 2) = 4.303 and
    # t(.8, 2) = 1.061 times that, on either side.
    assert by_arm["TeaFor2 (λ = .5)", "1"] == [
        *("2 and 2", "+0.80 ± 0.36", "-0.75 to +2.35", "1.93"),
        "seed 1: 0.020 (+0.25); seed 2: 0.300 (+0.25)",
    ]
    assert by_arm["TeaFor2 (λ = .5)", "4"][-1] == "seed 1: < .001 (+0.25)"
    assert by_arm["TeaFor2 (λ = .5, own decoders)", "1"][:4] == [
        *("1 and 2", "too few seeds", "too few seeds", "too few seeds"),
    ]
    name = "demo_ende-transformer_tiny"
    assert (
        f"Runs: `{name}-n2-discount0.5-unshared, seeds 1`; `{name}-n2-discount0.5, seeds 1, 2`; "
        f"compared with `{name}-n1, seeds 1, 2`. Bootstrap: `bs`.\n"
    ) in text
    assert "Bootstrap: <code>bs</code>." in (report[0] / "report.html").read_text()
    assert "sacreBLEU's estimate, in effect one-sided: double it for a two-sided test." in text


def test_cost(report):
    text = (report[0] / "report.md").read_text()
    rows = rows_of(text, "Cost of N")
    assert [row[1:5] for row in rows[2:]] == [
        ["Teacher forcing", "6 (1.00x)", "-", "1 (1.00x)"],
        ["TeaFor2 (λ = .5)", "3 (0.50x)", "-", "2 (2.00x)"],
    ]
    assert rows[3][5:8] == ["32", "1.25 (0.63x)", "8.96 (1.04x)"]
    name = "demo_ende-transformer_tiny"
    assert f"Runs: `{name}-n1, seeds 1, 2`; `{name}-n2-discount0.5, seeds 1, 2`.\n" in text


def test_cost_of_its_own_experiment(tmp_path):
    arms = get_experiment("cost").arms
    runs = [run(arm, 1, {}, task="demo_enfr") for arm in arms]
    path = results_file(
        tmp_path / "results.json", "cost", runs, (), seeds=[1], tasks={"gigaword": "demo_enfr"}
    )
    write_report([path], str(tmp_path))
    text = (tmp_path / "report.md").read_text()
    assert [row[1:3] + row[4:7] for row in rows_of(text, "Cost of N")[2:]] == [
        ["Teacher forcing", "6 (1.00x)", "1 (1.00x)", "16", "1.97 (1.00x)"],
        ["TeaFor2 (λ = .5)", "3 (0.50x)", "2 (2.00x)", "32", "1.25 (0.63x)"],
        ["TeaFor3 (λ = .5)", "2 (0.33x)", "3 (3.00x)", "48", "0.986 (0.50x)"],
    ]
    assert "3 of 3 runs are done" in text and "Against" not in text
    (row,) = (
        row
        for row in csv_rows(tmp_path)
        if (row["arm"], row["metric"]) == ("n3-discount0.5", "steps_per_second")
    )
    assert (row["table"], row["role"], row["beam_size"]) == ("Cost of N", "training", "")
    assert (float(row["mean"]), float(row["paper_mean"])) == (2.0, 0.986)
    assert (
        row["commands"]
        == "bin/train --model_dir=runs/demo_enfr-transformer_tiny-n3-discount0.5-seed1"
    )


def test_cost_is_compared_with_teacher_forcing_or_nothing(tmp_path):
    runs = [run(arm, 1, {}) for arm in get_experiment("base").arms]
    (teacher,), *_, (teafor,) = (part.values() for part in runs)
    del teacher["speed"]["steps_per_second"]
    (section,) = sections([results_file(tmp_path / "results.json", "base", runs, (1, 4))])
    assert [row[1:5] for row in section.tables[-1].rows] == [
        ("Teacher forcing", "-", "-", "1 (1.00x)"),
        ("TeaFor2 (λ = .5)", "3", "-", "2 (2.00x)"),
    ]
    # Of training that did not end, only the memory is known.
    del teafor["curves"], teacher["speed"]
    (section,) = sections([results_file(tmp_path / "results.json", "base", runs, (1, 4))])
    assert not any(table.title == "Cost of N" for table in section.tables)


def test_equal_compute(tmp_path):
    teacher, longer, teafor = get_experiment("equal_compute").arms
    runs = [
        run(teacher, 1, {1: 20.0, 4: 22.0, 8: 21.0}),
        run(longer, 1, {1: 20.5, 4: 22.5, 8: 23.0}),
        run(teafor, 1, {1: 21.0, 4: 23.5}),
    ]
    path = results_file(tmp_path / "results.json", "equal_compute", runs, range(1, 9), seeds=[1])
    write_report([path], str(tmp_path))
    name = "English-German (demo_ende stands for it)"
    # Beam 4 is teacher forcing's best.
    assert rows_of((tmp_path / "report.md").read_text(), "Equal compute")[2:] == [
        [name, "greedy", "20.00† [1] (28.10 ± .12)", "20.50† [2] (27.97 ± .20)"]
        + ["21.00† [3] (28.17 ± .07)"],
        [name, "beam (best k: 4)", "22.00† [4] (29.30 ± .20)", "22.50† [5] (29.20 ± .16)"]
        + ["23.50† [6]"],
    ]
    # The appendix has another standard error than Table 4.
    theirs = {
        (row["table"].partition(":")[0], row["arm"], row["beam_size"]): (
            row["paper_mean"],
            row["paper_standard_error"],
        )
        for row in csv_rows(tmp_path)
        if row["metric"] == "bleu"
    }
    assert theirs["Equal compute", "n1", "1"] == ("28.1", "0.12")
    assert theirs["BLEU by beam width", "n1", "1"] == ("28.1", "0.08")
    assert theirs["Equal compute", "n1-steps1.5x", "4"] == ("29.2", "0.16")


def test_summaries(tmp_path):
    experiment = get_experiment("summarization").scaled_down()
    assert experiment.metrics == ("rouge", "bleu")
    runs = [run(arm, 1, {1: 30.0 + arm.n, 8: 31.0 + arm.n}) for arm in experiment.arms]
    for one in runs:
        for evaluation in next(iter(one.values()))["evaluations"]:
            rouge = {"rouge1": 43.0, "rouge2": 20.5, "rougeL": 33.0, "rougeLsum": 40.5}
            evaluation["metrics"] |= rouge
            evaluation["signature"] |= dict.fromkeys(rouge, "rouge's")
            evaluation["checkpoint_flag"] = "best"
    path = tmp_path / "results.json"
    tasks = {"cnn_dailymail": "demo_ende"}
    results_file(path, "summarization", runs, (1, 8), seeds=[1], tasks=tasks)
    content = json.loads(path.read_text())
    content["experiments"]["summarization"]["checkpoints"] = ["best"]
    path.write_text(json.dumps(content))
    write_report([str(path)], str(tmp_path))
    header, _, *rows = rows_of((tmp_path / "report.md").read_text(), "Summaries")
    name = "CNN/DailyMail (demo_ende stands for it)"
    assert header[1:-1] == [f"{name}: ROUGE-{kind}" for kind in ("1", "2", "Lsum")]
    assert header[-1].strip() == f"{name}: BLEU"
    by_name = {row[0].strip(): [cell.partition(" [")[0] for cell in row[1:]] for row in rows}
    ours = ["43.00†", "20.50†", "40.50†"]
    assert by_name["Teacher forcing, greedy"] == [*ours, "31.00†"]
    assert by_name["TeaFor3 (λ = .5), beam 8"] == [*ours, "34.00†"]
    assert by_name["BART (Lewis et al. 2019) (paper)"] == ["44.16", "21.28", "40.90", "-"]
    (row,) = (row for row in rows if row[0].strip() == "TeaFor3 (λ = .5), greedy")
    assert [re.search(r"\((.*)\)$", cell)[1] for cell in row[1:4]] == ["43.90", "20.36", "41.20"]


def test_experiments_that_share_a_run_both_show_it(tmp_path):
    """At small scale one data set stands for two of the paper's tasks."""
    teacher, *_, shared = get_experiment("base").arms
    runs = [run(teacher, 1, {1: 30.0}), run(shared, 1, {1: 31.0})]
    runs += [run(get_experiment("summarization").arms[1], 1, {1: 33.0})]
    path = results_file(tmp_path / "results.json", "base", runs, (1,), seeds=[1])
    results = json.loads((tmp_path / "results.json").read_text())
    results["experiments"]["summarization"] = {
        **results["experiments"]["base"],
        "tasks": {"cnn_dailymail": "demo_ende"},
    }
    (tmp_path / "results.json").write_text(json.dumps(results))
    for section, task, means in zip(
        sections([path]), ("wmt14_ende", "cnn_dailymail"), ([30, 31], [30, 33]), strict=True
    ):
        numbers = [section.grid.number(task, arm, 1) for arm in section.grid.experiment.arms]
        assert [number.mean for number in numbers if number] == means


def test_what_another_experiment_scored_leaves_tables_as_they_are(tmp_path):
    teacher, *_ = get_experiment("top_k").arms
    one = run(teacher, 1, {1: 30.0, 2: 31.0})
    path = results_file(tmp_path / "results.json", "top_k", [one], (1, 2), seeds=[1])
    (before,) = sections([path])
    (record,) = one.values()
    titles = [table.title for table in tables(before.grid)]
    assert any(title.startswith("BLEU by beam width") for title in titles)
    rouge = {f"rouge{kind}": 40.0 for kind in ("1", "2", "L", "Lsum")}
    best = {"checkpoint_flag": "best", "metrics": rouge}
    record["evaluations"].append({**record["evaluations"][0], **best})
    path = results_file(tmp_path / "results.json", "top_k", [one], (1, 2), seeds=[1])
    (after,) = sections([path])
    assert [table.title for table in tables(after.grid)] == titles
    # At the experiment's own checkpoint they come beside.
    for evaluation in record["evaluations"][:2]:
        evaluation["metrics"] |= rouge
        evaluation["signature"] |= dict.fromkeys(rouge, "rouge's")
    path = results_file(tmp_path / "results.json", "top_k", [one], (1, 2), seeds=[1])
    (after,) = sections([path])
    assert {*titles} < {table.title for table in tables(after.grid)}


def test_all_commands_of_sweeps_are_listed(tmp_path, report):
    assert "- Sweep: `bin/sweep --experiment=base`\n" in (report[0] / "report.md").read_text()
    path = tmp_path / "results.json"
    results_file(path, "base", [run(Arm(), 1, {1: 30.0})], (1,))
    results = json.loads(path.read_text())
    about = results["experiments"]["base"]
    about["commands"] = ["bin/sweep --seeds=1", "bin/sweep --seeds=2"]
    path.write_text(json.dumps(results))
    write_report([str(path)], str(tmp_path))
    text = (tmp_path / "report.md").read_text()
    assert "- Sweep: `bin/sweep --seeds=1`\n- Sweep: `bin/sweep --seeds=2`\n" in text


def test_the_command(report, call_command, capsys, tmp_path):
    results = report[0].parent / "results.json"
    flags = [f"--results={results}", f"--output_dir={tmp_path}/report"]
    assert call_command("report", *flags) == 0
    written = capsys.readouterr().out.splitlines()
    assert f"Wrote {tmp_path}/report/report.html" in written
    for path in report[0].rglob("*.*"):
        assert (tmp_path / "report" / path.relative_to(report[0])).read_bytes() == path.read_bytes()


def test_every_number_says_where_it_comes_from(report):
    folder, _ = report
    text = (folder / "report.md").read_text()
    name = "demo_ende-transformer_tiny"
    sources = {row[0]: row for row in rows_of(text + "\n\n", "Where the numbers come from")[2:]}
    assert sources["5"][1:] == [
        "`BLEU, test, average:5, beam 1`",
        f"`{name}-n2-discount0.5, seeds 1, 2`",
        f"`bin/evaluate --model_dir=runs/{name}-n2-discount0.5-seed1 --beam_size=1`",
        f"`{SIGNATURE}`".replace("|", "\\|"),
        "`c0ffee`",
    ]
    used = set(re.findall(r"\[(\d+)\]", text))
    assert used == set(sources)
    rows = {(row["arm"], row["beam_size"], row["metric"]): row for row in csv_rows(folder)}
    row = rows["n2-discount0.5", "1", "bleu"]
    assert float(row["mean"]) == pytest.approx(31.0)
    assert float(row["standard_error"]) == pytest.approx(0.3)
    assert (row["seeds"], row["seeds_planned"], row["values"]) == ("2", "5", "30.700000 31.300000")
    assert (row["paper_mean"], row["signature"]) == ("27.16", SIGNATURE)
    assert rows["n2-discount0.5-unshared", "1", "bleu"]["standard_error"] == ""
    assert float(rows["n1", "4", "chrf"]["mean"]) == pytest.approx(51.0)


def test_each_metric_has_its_own_signature(report):
    text = (report[0] / "report.md").read_text()
    sources = {row[0]: row for row in rows_of(text + "\n\n", "Where the numbers come from")[2:]}
    _, _, *rows = rows_of(text, "All metrics, beam 4")
    numbers = [re.search(r"\[(\d+)\]", cell)[1] for cell in rows[0][1:]]
    assert [sources[number][4] for number in numbers] == [
        *(f"`{SIGNATURE}`".replace("|", "\\|"), "`chrf's`", "`ter's`"),
    ]


def test_a_run_that_was_not_scored_yet_is_listed_as_such(tmp_path):
    teacher, *_ = get_experiment("base").arms
    runs = [run(teacher, 1, {1: 30.0}), run(teacher, 2, {})]
    (unfinished,) = runs[1].values()
    del unfinished["status"], unfinished["error"], unfinished["evaluations"]
    path = results_file(tmp_path / "results.json", "base", runs, (1, 4))
    write_report([path], str(tmp_path))
    text = (tmp_path / "report.md").read_text()
    assert "1 of 15 runs are done" in text
    assert [row[1] for row in rows_of(text + "\n\n", "Runs")[2:]] == ["done", "not scored yet"]


def test_failures_and_warnings_are_said(report):
    folder, _ = report
    text = (folder / "report.md").read_text()
    assert "5 of 15 runs are done; seeds 1, 2 of 5; scale: small" in text
    assert "n2-discount0.5-unshared-seed2 failed: train ended with 1: <b>no memory</b>" in text
    # Seed 2 of both, and not of the arm that has only seed 1.
    assert warnings_of(text) == [
        "demo_ende, test: looks tokenised (demo_ende-transformer_tiny-n1, seeds 2; "
        "demo_ende-transformer_tiny-n2-discount0.5, seeds 2; beam 4)"
    ]
    # Texts of runs are no markup.
    page = (folder / "report.html").read_text()
    assert "<b>no memory" not in page and "&lt;b&gt;no memory" in page


def warnings_of(text):
    return re.findall(r"- (.*(?:tokenised|cut).*)", text)


def test_a_warning_of_all_runs_and_beam_widths_is_one_line(tmp_path):
    teacher, _, shared = get_experiment("base").arms
    runs = [run(arm, seed, {1: 30.0, 4: 31.0}) for arm in (teacher, shared) for seed in (1, 2)]
    others = run(teacher, 1, {1: 30.0, 4: 31.0}, task="demo_enfr")
    for one in (*runs, others):
        for evaluation in next(iter(one.values()))["evaluations"]:
            evaluation["warnings"] = ["3 lines were cut."] if one is not others else []
    tasks = {"wmt14_ende": "demo_ende", "wmt14_enfr": "demo_enfr"}
    path = results_file(tmp_path / "results.json", "base", [*runs, others], (1, 4), tasks=tasks)
    write_report([path], str(tmp_path))
    text = (tmp_path / "report.md").read_text()
    assert warnings_of(text) == ["demo_ende, test: 3 lines were cut. (all runs)"]


class Page(html.parser.HTMLParser):
    """Collects identifiers, links, and tags that are still open."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.open, self.sources = set(), set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if "id" in values:
            self.ids.add(values["id"])
        self.links |= {values["href"]} if "href" in values else set()
        self.sources += [values["src"]] if "src" in values else []
        if tag not in ("meta", "img", "br", "html", "body"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("html", "body"):
            assert self.open.pop() == tag


def test_the_page_is_whole_and_in_one_file(report):
    page = Page((report[0] / "report.html").read_text())
    assert page.open == []
    assert page.links == {f"#{name}" for name in page.ids}
    assert page.sources and all(s.startswith("data:image/svg+xml;base64,") for s in page.sources)


def test_figures(report):
    folder, section = report
    pixels = image.imread(folder / "figures" / "base-wmt14_ende-losses.png")
    assert min(pixels.shape[:2]) > 300 and pixels.std() > 0.05
    svg = (folder / "figures" / "base-wmt14_ende-losses.svg").read_text()
    assert svg.startswith("<?xml") and svg.rstrip().endswith("</svg>")
    panels = {
        panel.get_title(): {
            line.get_label(): dict(line.get_xydata().tolist()) for line in panel.get_lines()
        }
        for panel in section.figures["base-wmt14_ende-losses"].axes
    }
    # Means of seeds 1 and 2: what a run that failed later has trained counts as well.
    stage_0, stage_1 = {5: 3.1875, 10: 2.1875}, {5: 4.1875, 10: 3.1875}
    teacher = {"stage 0": stage_0, "validation, stage 0": {10: 2.375}}
    assert panels == {
        "Teacher forcing": teacher,
        "TeaFor2 (λ = .5)": {**teacher, "stage 1": stage_1},
        "TeaFor2 (λ = .5, own decoders)": {**teacher, "stage 1": stage_1},
    }


def test_mean_loss_curves_are_of_all_runs_at_every_step(tmp_path):
    """Thinned by strides of their own, the last step apart; one run began to log later."""
    teacher = get_experiment("base").arms[0]
    steps = {1: [*range(10, 4000, 20), 4000], 2: [*range(70, 4000, 30), 4000]}
    runs = [run(teacher, seed, {1: 30.0}) for seed in steps]
    for one, (seed, at) in zip(runs, steps.items(), strict=True):
        curve = [[step, 8 * seed - step / 1024] for step in at]
        validated = {1: [[1000, 4.0], [2000, 3.0]], 2: [[1000, 5.0], [1500, 4.0], [2000, 3.5]]}
        curves = {"train": {"loss_0": curve}, "validation": {"loss_0": validated[seed]}}
        next(iter(one.values()))["curves"] = curves
    (section,) = sections([results_file(tmp_path / "results.json", "base", runs, (1,))])
    figure = section.figures["base-wmt14_ende-losses"]
    assert figure.get_suptitle().endswith("loss by stage, mean over seeds")
    (alone,) = sections([results_file(tmp_path / "one.json", "base", runs[:1], (1,))])
    assert alone.figures["base-wmt14_ende-losses"].get_suptitle().endswith("by stage, one seed")
    (panel,) = figure.axes
    train, validation = (dict(line.get_xydata().tolist()) for line in panel.get_lines())
    # Both lines are straight, so that what lies between two points is known.
    assert train == pytest.approx({step: 12 - step / 1024 for step in steps[2]})
    assert validation == {1000: 4.5, 2000: 3.25}


def run_on_both_sets(arm, seed, dev, test):
    """{name: run} with a score on the development set, and two on the test set."""
    found = run(arm, seed, {8: dev}, role="dev")
    (name,) = found
    found[name]["evaluations"] += run(arm, seed, {1: test - 1, 8: test})[name]["evaluations"]
    return found


def test_discount_is_chosen_on_the_development_set_and_curves_are_drawn(tmp_path):
    scores = {Arm(2, 0.2): (20.0, 99.0), Arm(2, 0.4): (21.0, 60.0), Arm(): (19.0, 59.0)}
    scores |= {Arm(2, discount): (19.5, 58.0) for discount in (0.6, 0.8, 1.0)}
    scores |= {Arm(3, discount): (22.0, 70.0) for discount in (0.2, 0.4)}
    runs = [run_on_both_sets(arm, 1, *both) for arm, both in scores.items()]
    path = results_file(tmp_path / "results.json", "big", runs, range(1, 9), seeds=[1])
    (section,) = sections([path])
    chosen = section.tables[0]
    assert chosen.rows[0][1].mean == 59.0
    assert chosen.rows[1][1].mean == 60.0 and chosen.rows[1][2] == ".4 (paper .4)"
    assert chosen.rows[1][1].reported.mean == 29.30
    # Two of five do not show which is best.
    assert chosen.rows[2] == ("TeaFor3", None, "- (paper .4)")
    assert chosen.note.endswith(
        "there. So far: TeaFor3, English-German (demo_ende stands for it): 2 of 5."
    )
    figure = section.figures["big-wmt14_ende-teafor2-beams"]
    ours, theirs = figure.axes
    assert theirs.get_ylabel() == "the paper's (dashed)"
    dashed = {tuple(line.get_ydata()) for line in theirs.get_lines()}
    assert tuple(mean for mean, _ in paper.BIG["wmt14_ende", "test", 2][2].values()) in dashed
    assert len(dashed) == 6 and {line.get_linestyle() for line in theirs.get_lines()} == {"--"}
    solid = [line for line in ours.get_lines() if line.get_linestyle() == "-"]
    assert [59.0, 60.0] in [list(line.get_ydata()) for line in solid]
    spans = [high - low for low, high in (ours.get_ylim(), theirs.get_ylim())]
    assert spans[0] == pytest.approx(spans[1])
    said = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"ours: one seed", "the paper's"} < said


def test_discount_is_chosen_among_equal_numbers_of_seeds(tmp_path):
    """With the second seed of all, another one is best than with that of some."""
    scores = {(Arm(2, d), seed): 20.0 for d in paper.DISCOUNTS for seed in (1, 2)}
    scores |= {(Arm(2, 0.2), 1): 22.0, (Arm(2, 0.2), 2): 19.0, (Arm(2, 0.4), 1): 21.5}
    runs = [run_on_both_sets(*place, dev, 30.0) for place, dev in scores.items()]
    late = next(run for run in runs if "-n2-discount0.2-seed2" in next(iter(run)))
    found = []
    for there in ([run for run in runs if run is not late], runs):
        path = results_file(tmp_path / "results.json", "big", there, range(1, 9))
        (section,) = sections([path])
        found.append(section.tables[0])
    assert found[0].rows[1] == ("TeaFor2", None, "- (paper .4)")
    assert "TeaFor2, English-German (demo_ende stands for it): 4 of 5; TeaFor3" in found[0].note
    # 20.75 against 20.5.
    assert found[1].rows[1][2] == ".4 (paper .4)" and found[1].rows[1][1].values == (30.0, 30.0)
    assert "TeaFor2" not in found[1].note


def test_refusals(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        sections([str(tmp_path / "none.json")])
    (tmp_path / "empty.json").write_text('{"format_version": 1, "experiments": {}, "runs": {}}')
    with pytest.raises(UserError, match="no experiment in it yet"):
        sections([str(tmp_path / "empty.json")])


def test_standard_errors_of_the_appendix_are_of_the_population_deviation():
    """Three scores of one decimal give all of its cells; the notes say how ours differ."""
    spreads = [(0, a, b) for b in range(9) for a in range(b + 1)]
    for deviation, all_found in ((statistics.pstdev, True), (statistics.stdev, False)):
        found = {(sum(s) % 3, f"{deviation(s) / 10 / 3**0.5:.2f}") for s in spreads}
        for name in ("big", "top_k", "word_drop"):
            cells = {
                (round(score.mean * 30) % 3, f"{score.error:.2f}")
                for score in get_experiment(name).reported.values()
            }
            assert (cells <= found) == all_found
    ratio = statistics.stdev(spreads[-1]) / statistics.pstdev(spreads[-1])
    for name in ("big", "top_k", "word_drop", "equal_compute"):
        (note,) = (note for note in get_experiment(name).notes if "population deviation" in note)
        assert f" {ratio:.2f} times as large" in note


def test_the_paper_s_numbers():
    """Spot checks against the paper's tables."""
    big = get_experiment("big").reported
    assert big["wmt14_enfr", "test", "n2-discount0.2", 8, "bleu"] == catalog.Score(42.73, 0.05)
    assert big["wmt14_ende", "dev", "n3-discount0.4", 8, "bleu"] == catalog.Score(22.40, 0.05)
    assert big["wmt14_ende", "test", "n1", 6, "bleu"] == catalog.Score(29.30, 0.12)
    top_k = get_experiment("top_k").reported
    found = top_k["wmt14_enfr", "test", "n2-discount0.2-top_k4", 1, "bleu"]
    assert found == catalog.Score(42.23, 0.11)
    drop = get_experiment("word_drop").reported
    assert drop["wmt14_ende", "test", "n1-word_drop0.3", 1, "bleu"] == catalog.Score(28.20, 0.08)
    rouge = get_experiment("summarization").reported
    assert rouge["gigaword", "test", "n3-discount0.5", 8, "rougeL"].mean == 36.54
    assert rouge["cnn_dailymail", "test", "n1", 8, "rougeLsum"].mean == 41.11
    for name in catalog.experiment_names():
        experiment = get_experiment(name)
        names = {arm.name for arm in experiment.arms}
        assert len(names) == len(experiment.arms)
        assert {key[2] for key in experiment.reported} <= names
        assert {key[0] for key in experiment.reported} <= set(experiment.tasks)

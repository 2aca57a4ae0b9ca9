"""Makes a report of an experiment's results: HTML, Markdown, CSV and figures.

    bin/report --results=runs/base/results.json --output_dir=runs/base/report
    bin/report --results=runs/ende/results.json,runs/enfr/results.json --output_dir=report

Files of the same experiment, data and settings are parts of one grid and make one section.
Writes report.html (one file with everything in it), report.md, numbers.csv and figures/.
"""

from absl import flags

from tf_teaforn.cli import app


def define_flags(values):
    """Flags of bin/report."""
    flags.DEFINE_list(
        "results",
        [],
        "Files that bin/sweep wrote; parts of one grid (seeds, arms, tasks) make one section.",
        flag_values=values,
    )
    flags.DEFINE_string("output_dir", None, "Folder for the report.", flag_values=values)


def report(values):
    """Runs the command."""
    paths = app.local(values, "results")
    output_dir = app.local(values, "output_dir")

    from tf_teaforn.experiments.report import write_report

    for path in write_report(paths, output_dir):
        print(f"Wrote {path}")


def main():
    """Entry point."""
    app.run(define_flags, report, __doc__)

"""bin/sweep and bin/report from end to end: what the grid needs runs in processes of its own."""

import csv
import dataclasses
import json
from pathlib import Path

import pytest
import sacrebleu

from tests import nano_model
from tf_teaforn.experiments import catalog
from tf_teaforn.texts import read_lines

ROOT = Path(__file__).resolve().parents[2]
ARMS = ("n2-discount0.2", "n2-discount0.5")


def test_from_a_grid_to_its_report(
    corpus, small_model, call_command, capsys, caplog, monkeypatch, tmp_path
):
    small = dataclasses.replace(
        catalog.get_experiment("multi30k"), beam_sizes=(1, 2), checkpoints=("average:5",)
    )
    monkeypatch.setattr(catalog, "_EXPERIMENTS", (small,))
    flags = [
        "--experiment=multi30k",
        "--scale=small",
        f"--arms={','.join(ARMS)}",
        "--seeds=1,2",
        "--parallel=2",
        f"--output_dir={tmp_path}",
        *(f"--{split}_files={corpus / split}.tsv" for split in ("train", "valid", "test")),
        *small_model,
        *nano_model.FLAGS,
        "--train_steps=45",
        "--checkpoint_every=5",
        "--eval_every=45",
        "--log_every=15",
        "--learning_rate=0.02",
        "--warmup_steps=10",
        "--decode_length=8",
    ]
    path = tmp_path / "results.json"
    with caplog.at_level("INFO", logger="tf_teaforn"):
        assert call_command(ROOT / "bin" / "sweep", *flags) == 0
    expected = f"Next: bin/report --results={path} --output_dir={tmp_path}/report\n"
    assert capsys.readouterr().out.endswith(expected)
    for number in range(1, 5):
        assert f"[{number}/4] " in caplog.text

    runs = json.loads(path.read_text())["runs"]
    assert set(runs) == {
        f"text-transformer_nano-{arm}-seed{seed}" for arm in ARMS for seed in (1, 2)
    }
    scores = {}
    for name, run in runs.items():
        assert run["status"] == "done"
        assert [step for step, _ in run["curves"]["train"]["loss_1"]] == [15, 30, 45]
        for evaluation in run["evaluations"]:
            assert evaluation["steps"] == [25, 30, 35, 40, 45]
            width = evaluation["beam_size"]
            folder = tmp_path / "runs" / name / "eval"
            hypotheses = read_lines(folder / f"test-average-5-45-beam{width}-alpha0.6.txt")
            references = read_lines(folder / "test.references.txt")
            bleu = sacrebleu.corpus_bleu(hypotheses, [references]).score
            assert evaluation["metrics"]["bleu"] == pytest.approx(bleu)
            scores.setdefault((run["arm"], width), []).append(bleu)
    assert set(scores) == {(arm, width) for arm in ARMS for width in (1, 2)}
    assert {len(of_seeds) for of_seeds in scores.values()} == {2}

    with caplog.at_level("INFO", logger="tf_teaforn"):
        assert call_command("sweep", *flags) == 0
    assert caplog.text.count("was done already") == 4

    report = tmp_path / "report"
    assert call_command("report", f"--results={path}", f"--output_dir={report}") == 0
    with open(report / "numbers.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "bleu"]
    assert len(rows) == len(scores) and any(float(row["mean"]) > 0 for row in rows)
    for row in rows:
        one, two = scores[row["arm"], int(row["beam_size"])]
        assert float(row["mean"]) == pytest.approx((one + two) / 2, abs=1e-6)
        assert float(row["standard_error"]) == pytest.approx(abs(one - two) / 2, abs=1e-6)
        assert (row["seeds"], row["seeds_planned"]) == ("2", "3")

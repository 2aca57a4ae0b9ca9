"""What commands make of their flags and of what comes back."""

import numpy as np
import pytest

from tf_teaforn import evaluation, export, inference, model_dir
from tf_teaforn.config import RunConfig
from tf_teaforn.evaluation import Request
from tf_teaforn.experiments import sweep


@pytest.fixture
def folder(tmp_path):
    """Of a run of the demo."""
    model_dir.write_config(tmp_path, RunConfig(task="demo_enfr"), [])
    return str(tmp_path)


def test_evaluate(folder, call_command, capsys, monkeypatch):
    result = {
        "split": "wmt12",
        "checkpoint": "average-5-45",
        "beam_size": 4,
        "beam_alpha": 0.8,
        "no_repeat_ngram": 3,
        "examples": 7,
        "seconds": 2.0,
        "metrics": {"bleu": 30.0, "chrf": 50.0},
        "signature": {"bleu": "B", "chrf": "C"},
        "references_sha256": "abc",
        "interval_95": {"bleu": [29.0, 31.5]},
        "comparison": {
            "bleu": {"baseline": 29.5, "p_value": 0.0123},
            "chrf": {"baseline": 49.0, "p_value": 0.5},
        },
    }
    calls = []
    monkeypatch.setattr(evaluation, "evaluate", lambda *given: [calls.append(given), result][1:])
    flags = [
        f"--model_dir={folder}",
        "--checkpoint=average:5",
        "--beam_size=1,4",
        "--beam_alpha=0.8",
        "--no_repeat_ngram=3",
        "--batch_size=5",
        "--test_set=wmt12",
        "--language_pair=en-fr",
        "--metrics=bleu,chrf",
        "--compare=other.txt",
        "--intervals",
    ]
    assert call_command("evaluate", *flags) == 0
    model, task, request = calls[0]
    assert model == folder and task.name == "demo_enfr"
    assert request == Request(
        checkpoint="average:5",
        beam_sizes=[1, 4],
        alpha=0.8,
        outputs={"no_repeat_ngram": 3},
        batch_size=5,
        test_set="wmt12",
        language_pair="en-fr",
        metrics=["bleu", "chrf"],
        compare="other.txt",
        intervals=True,
        command=["evaluate", *flags],
    )
    assert call_command("evaluate", f"--model_dir={folder}", "--split=validation") == 0
    assert calls[1][2].split == "validation" and calls[1][2].test_set is None
    assert capsys.readouterr().out.splitlines()[:6] == [
        "wmt12 · checkpoint average-5-45 · beam 4 · alpha 0.8 · no_repeat_ngram 3 · 7 examples · "
        "2.0 s",
        "  bleu 30.00  95%: 29.00 to 31.50  against 29.50: p = 0.0123, one-sided",
        "  chrf 50.00  against 49.00: p = 0.5000, one-sided",
        "  bleu: B",
        "  chrf: C",
        "  references: sha256 abc",
    ]


@pytest.mark.parametrize("checkpoint", ["all", "45"])
def test_export(call_command, capsys, monkeypatch, checkpoint):
    calls = []

    def export_all(*places, **settings):
        calls.append((*places, "all", settings))
        return [(15, "/e/1"), (30, "/e/2")]

    def export_one(*places, **settings):
        calls.append((*places, settings))
        return "/e/3"

    monkeypatch.setattr(export, "export_all", export_all)
    monkeypatch.setattr(export, "export", export_one)
    flags = ("--beam_size=8", "--beam_alpha=0.8", "--weights_dtype=bfloat16", "--n_best=2")
    flags += ("--static_batch=4", "--static_length=16", f"--checkpoint={checkpoint}")
    assert call_command("export", "--model_dir=/m", "--export_dir=/e", *flags) == 0
    settings = {
        "mode": "predict",
        "beam_size": 8,
        "alpha": 0.8,
        "n_best": 2,
        "weights_dtype": "bfloat16",
        "static_batch": 4,
        "static_length": 16,
    }
    assert calls == [("/m", "/e", checkpoint, settings)]
    steps = ["Exported step 15 to /e/1", "Exported step 30 to /e/2"]
    expected = steps if checkpoint == "all" else ["Exported to /e/3"]
    assert capsys.readouterr().out.splitlines() == expected


class FakeTranslator:
    max_source_length, max_target_length = 20, 30
    cut_sources, cut_targets = 0, 1

    def score(self, sources, targets):
        assert self.batch_size == 7
        assert (sources, targets) == (["a", "b"], ["c d", "e"])
        return np.array([-2.0, -4.0])

    def count_tokens(self, targets):
        return np.array([2, 1])


def test_score(call_command, capsys, caplog, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(
        inference, "load", lambda *given: [calls.append(given), FakeTranslator()][1]
    )
    (tmp_path / "source").write_text("a\nb\n")
    (tmp_path / "target").write_text("c d\ne\n")
    flags = [f"--{name}={tmp_path}/{name}" for name in ("source", "target")]
    flags += ["--checkpoint=average:2", "--batch_size=7"]
    assert call_command("score", "--model_dir=/m", *flags) == 0
    assert calls == [("/m", "average:2")]
    printed = capsys.readouterr()
    # exp(2 / 2), exp(4 / 1), exp(6 / 3)
    assert printed.out == "-2.000000\t2\t2.7183\n-4.000000\t1\t54.5982\n"
    assert "2 lines, 3 tokens, log probability -6.0000, perplexity 7.3891\n" in printed.err
    assert "1 of 2 target lines were cut: more than 30 subwords" in caplog.text + printed.err


@pytest.mark.parametrize("failed", [[], ["demo_enfr-transformer_tiny-n1-seed3"]])
def test_sweep(call_command, capsys, monkeypatch, tmp_path, failed):
    monkeypatch.setattr(sweep.Sweep, "run", lambda self: failed)
    flags = ["--experiment=base", "--scale=small", "--seeds=3", "--task=wmt14_enfr"]
    assert call_command("sweep", *flags, f"--output_dir={tmp_path}") == (2 if failed else 0)
    printed = capsys.readouterr()
    results = f"{tmp_path}/results.json"
    report = f"bin/report --results={results} --output_dir={tmp_path}/report"
    assert printed.out == f"Wrote {results}. Next: {report}\n"
    expected = f"sweep: 1 of 3 runs failed: {failed[0]}. The reasons are in " if failed else ""
    assert printed.err.startswith(expected) and bool(printed.err) == bool(failed)

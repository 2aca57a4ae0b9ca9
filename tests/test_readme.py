"""The README's example runs as it is printed."""

import ast
import os
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_fine_tuning_example(trained, tmp_path, monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 18
    monkeypatch.chdir(tmp_path)
    os.makedirs("runs")
    os.symlink(trained.model_dir, "runs/demo_enfr")
    scope = {}
    # All but what it learns, and what it then prints.
    before, after = example.split("model.fit(")
    exec(before, scope)
    batch = (scope["inputs"], scope["targets"], scope["weights"])
    start = float(scope["model"].loss_sums(*batch).stages[0])
    exec(f"model.fit({after}", scope)
    assert float(scope["model"].loss_sums(*batch).stages[0]) < 0.5 * start
    (translation,) = ast.literal_eval(capsys.readouterr().out)
    assert translation == scope["translator"](["Today is Sunday."])[0]

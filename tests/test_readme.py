"""The README's example runs as it is printed."""

import os
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_fine_tuning_example(trained, tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 18
    monkeypatch.chdir(tmp_path)
    os.makedirs("runs")
    os.symlink(trained.model_dir, "runs/demo_enfr")
    scope = {}
    exec(example, scope)
    losses = scope["model"].evaluate(
        scope["inputs"],
        scope["targets"],
        sample_weight=scope["weights"],
        verbose=0,
        return_dict=True,
    )
    assert losses["loss_0"] < 4.0
    assert len(scope["translator"](["Today is Sunday."])) == 1

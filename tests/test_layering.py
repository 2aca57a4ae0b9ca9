"""Imports go one way, and each framework stays where it belongs."""

from pathlib import Path

import pytest

from tools import gen_build

ROOT = Path(__file__).resolve().parent.parent

# Layer -> the layers below it that it may import. A layer is a file or a folder with all below it;
# a file belongs to the longest that fits.
_ERRORS = "tf_teaforn/errors.py"
_PATHS = "tf_teaforn/paths.py"
_CORES = "tf_teaforn/cores.py"
_DATA = ["tf_teaforn/data", "tf_teaforn/task.py", _ERRORS]
_MODEL = ["tf_teaforn/objective.py", "tf_teaforn/models", _ERRORS]
_ACCUMULATION = "tf_teaforn/accumulation.py"
_BACKENDS = ["tf_teaforn/tf_backend", "tf_teaforn/jax_backend"]
_PARTS = [
    *_DATA,
    *_MODEL,
    *_BACKENDS,
    "tf_teaforn/checkpoint.py",
    "tf_teaforn/config.py",
    _CORES,
    "tf_teaforn/decoding.py",
    "tf_teaforn/interruption.py",
    "tf_teaforn/lock.py",
    "tf_teaforn/metrics.py",
    "tf_teaforn/model_dir.py",
    "tf_teaforn/optimizers.py",
    "tf_teaforn/out_of_memory.py",
    _PATHS,
    "tf_teaforn/pretrained",
    "tf_teaforn/teaforn.py",
    "tf_teaforn/texts.py",
]
_EXPERIMENTS = "tf_teaforn/experiments"
_RUNS = [
    "tf_teaforn/tpu_check.py",
    "tf_teaforn/evaluation.py",
    "tf_teaforn/export.py",
    "tf_teaforn/inference.py",
    "tf_teaforn/training.py",
]
LAYERS = {
    "bin": ["tasks", "tf_teaforn/cli"],
    "tf_teaforn/cli": ["tasks", _EXPERIMENTS, *_RUNS, *_PARTS],
    "tasks": _DATA,
    "tf_teaforn/__init__.py": [*_RUNS, *_PARTS],
    "tf_teaforn/training.py": [run for run in _RUNS if "training" not in run] + _PARTS,
    "tf_teaforn/evaluation.py": ["tf_teaforn/inference.py", *_PARTS],
    "tf_teaforn/export.py": ["tf_teaforn/inference.py", *_PARTS],
    "tf_teaforn/inference.py": _PARTS,
    "tf_teaforn/tpu_check.py": ["tf_teaforn/hlo.py", *_PARTS],
    "tf_teaforn/hlo.py": [],
    _EXPERIMENTS: [
        "tf_teaforn/checkpoint.py",
        "tf_teaforn/config.py",
        _CORES,
        "tf_teaforn/data",
        "tf_teaforn/lock.py",
        "tf_teaforn/metrics.py",
        "tf_teaforn/task.py",
        "tf_teaforn/texts.py",
        _ERRORS,
        _PATHS,
    ],
    "tf_teaforn/model_dir.py": [
        "tf_teaforn/checkpoint.py",
        "tf_teaforn/config.py",
        "tf_teaforn/data",
        _PATHS,
        *_MODEL,
    ],
    "tf_teaforn/pretrained": [
        "tf_teaforn/checkpoint.py",
        "tf_teaforn/data",
        "tf_teaforn/model_dir.py",
        "tf_teaforn/tf_backend",
        _PATHS,
        *_MODEL,
    ],
    "tf_teaforn/teaforn.py": [*_MODEL, *_BACKENDS, "tf_teaforn/config.py"],
    "tf_teaforn/tf_backend": [
        "tf_teaforn/data",
        "tf_teaforn/decoding.py",
        _ACCUMULATION,
        _PATHS,
        *_MODEL,
    ],
    "tf_teaforn/jax_backend": [
        "tf_teaforn/decoding.py",
        "tf_teaforn/hlo.py",
        "tf_teaforn/out_of_memory.py",
        _ACCUMULATION,
        *_MODEL,
    ],
    "tf_teaforn/decoding.py": _MODEL,
    "tf_teaforn/models": ["tf_teaforn/objective.py", _ERRORS],
    _ACCUMULATION: ["tf_teaforn/objective.py", _ERRORS],
    "tf_teaforn/objective.py": [_ERRORS],
    "tf_teaforn/optimizers.py": ["tf_teaforn/tf_backend", _ERRORS],
    "tf_teaforn/out_of_memory.py": ["tf_teaforn/config.py"],
    "tf_teaforn/testing.py": _MODEL,
    "tf_teaforn/task.py": ["tf_teaforn/data", _ERRORS],
    "tf_teaforn/data": [_CORES, _ERRORS, _PATHS],
    "tf_teaforn/checkpoint.py": [_ERRORS, _PATHS],
    "tf_teaforn/config.py": [_ERRORS],
    "tf_teaforn/interruption.py": [_ERRORS],
    "tf_teaforn/lock.py": [_ERRORS, _PATHS],
    "tf_teaforn/metrics.py": [_ERRORS],
    _CORES: [],
    "tf_teaforn/flops.py": [],
    "tf_teaforn/texts.py": [],
    "tf_teaforn/errors.py": [],
    _PATHS: [],
    # No layers of the product: they may import whatever they look at.
    "benchmarks": None,
    "examples": None,
    "tests": None,
    "setup.py": [],
    "tools": [],
}

# Distribution -> the only layers of the product that may import it.
FRAMEWORKS = {
    "tensorflow": ["tf_teaforn/data", "tf_teaforn/tf_backend", "tasks"],
    "tensorflow_datasets": ["tf_teaforn/data", "tf_teaforn/tf_backend", "tasks"],
    "tensorflow_text": ["tf_teaforn/data", "tf_teaforn/tf_backend", "tasks"],
    "apache_beam": ["tf_teaforn/data"],
    "jax": ["tf_teaforn/jax_backend"],
    "jaxlib": ["tf_teaforn/jax_backend"],
}
# All that the core may import besides the standard library.
CORE = {
    layer: {"keras", "keras_hub", "keras_nlp", "numpy"}
    for layer in (
        _ACCUMULATION,
        "tf_teaforn/objective.py",
        "tf_teaforn/teaforn.py",
        "tf_teaforn/decoding.py",
        "tf_teaforn/models",
    )
}


def layer_of(file: Path) -> str | None:
    """The longest layer that holds `file`, or None."""
    prefixes = [parent.as_posix() for parent in [file, *file.parents]]
    return next((prefix for prefix in prefixes if prefix in LAYERS), None)


def violations(root: Path) -> list[str]:
    """One line for every import of the tree under `root` that the tables above do not allow."""
    found = []
    for file in gen_build.source_files(root):
        layer = layer_of(file)
        if layer is None:
            found.append(f"{file} belongs to no layer")
            continue
        imported = gen_build.imports(file, root)
        allowed = LAYERS[layer]
        for other in sorted({layer_of(other) for other in imported.files} - {layer, None}):
            if allowed is not None and other not in allowed:
                found.append(f"{file} ({layer}) imports {other}")
        for name in sorted(imported.distributions):
            if allowed is not None and layer not in FRAMEWORKS.get(name, [layer]):
                found.append(f"{file} ({layer}) imports {name}")
            elif name not in CORE.get(layer, {name}):
                found.append(f"{file} ({layer}) imports {name}")
    return found


def test_imports_go_one_way():
    assert violations(ROOT) == []


def test_layers_have_no_circle():
    order = list(LAYERS)
    below = {layer: {other for other in allowed or []} for layer, allowed in LAYERS.items()}
    while below:
        bottom = [layer for layer, others in below.items() if not others & set(below)]
        assert bottom, f"circle among {sorted(below, key=order.index)}"
        below = {layer: others for layer, others in below.items() if layer not in bottom}


def test_every_layer_exists():
    assert [layer for layer in LAYERS if not (ROOT / layer).exists()] == []


@pytest.mark.parametrize(
    ("file", "code", "violation"),
    [
        ("tf_teaforn/objective.py", "import tensorflow as tf", "imports tensorflow"),
        ("tf_teaforn/models/a.py", "def f():\n    import jax", "imports jax"),
        ("tf_teaforn/models/a.py", "from tf_teaforn import teaforn", "imports tf_teaforn/teaforn"),
        ("tf_teaforn/models/a.py", "from ..teaforn import TeaForN", "imports tf_teaforn/teaforn"),
        ("tf_teaforn/decoding.py", "import tf_teaforn.data.a", "imports tf_teaforn/data"),
        ("tf_teaforn/decoding.py", "import attrs", "imports attrs"),
        ("tf_teaforn/data/a.py", "import tf_teaforn.models.a", "imports tf_teaforn/models"),
        ("tf_teaforn/cli/a.py", "if f:\n    import tensorflow", "imports tensorflow"),
        ("bin/train", "from tf_teaforn.teaforn import TeaForN", "imports tf_teaforn/teaforn"),
        ("tf_teaforn/new.py", "", "belongs to no layer"),
        ("elsewhere/new.py", "", "belongs to no layer"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, file, code, violation):
    for module in ("tf_teaforn/teaforn.py", "tf_teaforn/data/a.py", "tf_teaforn/models/a.py"):
        (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / module).touch()
    assert violations(tmp_path) == []
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(code)
    (line,) = violations(tmp_path)
    assert line.startswith(file) and violation in line

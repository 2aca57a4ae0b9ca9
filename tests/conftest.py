"""A small corpus and models trained on it by the commands themselves, once for all tests."""

import contextlib
import dataclasses
import gzip
import importlib
import lzma
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# JAX would look for a TPU, because libtpu is installed, and report at length that there is none.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# To compile small models takes longer than to run them.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# What -m "not slow" leaves out.
_SLOW_FILES = {
    "test_jax.py",
    "test_jax_training.py",
    "test_replicas.py",
    "test_resume.py",
    "test_sweep_command.py",
    "test_tpu_check.py",
    "test_workers.py",
}
# About how long a core is busy with each. The longest come first: begun last, one would keep a
# worker busy while the others have nothing to do.
_SECONDS = {
    "test_teaforn.py": 200,
    "test_replicas.py": 185,
    "test_resume.py": 170,
    "test_jax.py": 135,
    "test_families.py": 130,
    "test_sweep_command.py": 110,
    "test_jax_training.py": 105,
    "test_cli.py": 105,
    "test_tpu_check.py": 100,
    "test_training.py": 70,
    "test_workers.py": 65,
    "test_clipping_and_decay.py": 60,
    "test_export.py": 45,
    "test_importers.py": 40,
    "test_sweep.py": 35,
    "test_pegasus.py": 30,
    "test_serving_client.py": 30,
    "test_readme.py": 17,
    "test_tfds_training.py": 15,
}


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: -_SECONDS.get(item.path.name, 0))
    for item in items:
        if item.path.name in _SLOW_FILES:
            item.add_marker("slow")


_NOUNS = {
    "cat": "chat",
    "dog": "chien",
    "bird": "oiseau",
    "horse": "cheval",
    "house": "bâtiment",
    "tree": "arbre",
    "book": "livre",
    "river": "fleuve",
    "bread": "pain",
    "milk": "lait",
    "sun": "soleil",
    "moon": "lune",
}


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run of bin/train.

    Attributes:
        model_dir: its folder.
        flags: all but --model_dir.
        stdout, stderr: what it printed.
        files: names of what was in the folder when it ended.
    """

    model_dir: Path
    flags: tuple[str, ...]
    stdout: str
    stderr: str
    files: frozenset[str] = frozenset()


@pytest.fixture(autouse=True)
def same_draws():
    """Dropout and word drop draw the same in every run of a test, whatever ran before it."""
    import keras

    keras.utils.set_random_seed(0)


@pytest.fixture(scope="session")
def run_command():
    """Runs a file of bin/ in a process of its own; returns the `CompletedProcess`, in bytes."""

    def run(name, *flags, **options):
        hidden = ("TF_CPP_MIN_LOG_LEVEL", "KERAS_BACKEND", "PYTHONPATH")
        environment = {key: value for key, value in os.environ.items() if key not in hidden}
        command = [sys.executable, ROOT / "bin" / name, *flags]
        return subprocess.run(command, capture_output=True, env=environment, **options)

    return run


@pytest.fixture(scope="session")
def call_command():
    """Runs a command in this process; returns its exit code. Tests read the output by capsys.

    A path is that of the program itself, for those that look for others beside it.
    """

    def call(name, *flags):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [str(name), *flags])
            patch.setattr("tf_teaforn.cli.app.quiet_tensorflow", lambda: None)
            patch.setattr("tf_teaforn.cli.train.keep_freed_memory", lambda: None)
            try:
                importlib.import_module(f"tf_teaforn.cli.{Path(name).name}").main()
            except SystemExit as end:
                return end.code
        return 0

    return call


@pytest.fixture(scope="session")
def eagerly():
    """Context without TensorFlow's graphs: to trace them takes longer than a few small steps."""

    @contextlib.contextmanager
    def context():
        import tensorflow as tf

        tf.config.run_functions_eagerly(True)
        try:
            yield
        finally:
            tf.config.run_functions_eagerly(False)

    return context


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Folder with {train,valid,test}.tsv and the same as .en.gz and .fr: 240, 12 and 12 pairs."""
    pairs = [
        pair
        for noun, nom in _NOUNS.items()
        for pair in (
            (f"I see the {noun}", f"je vois le {nom}"),
            (f"you have the {noun}", f"tu as le {nom}"),
        )
    ]
    random.Random(0).shuffle(pairs)
    folder = tmp_path_factory.mktemp("corpus")
    for name, part in (("train", pairs * 10), ("valid", pairs[:12]), ("test", pairs[12:])):
        (folder / f"{name}.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in part))
        with gzip.open(folder / f"{name}.en.gz", "wt") as file:
            file.write("".join(f"{source}\n" for source, _ in part))
        (folder / f"{name}.fr").write_text("".join(f"{target}\n" for _, target in part))
    return folder


@pytest.fixture(scope="session")
def pegasus_folder(tmp_path_factory):
    """A tiny PEGASUS as Hugging Face keeps it; tests/testdata/make_families.py made it."""
    folder = tmp_path_factory.mktemp("pretrained") / "pegasus"
    shutil.copytree(ROOT / "tests" / "testdata" / "pegasus", folder)
    packed = folder / "spiece.model.xz"
    packed.with_suffix("").write_bytes(lzma.decompress(packed.read_bytes()))
    return folder


@pytest.fixture(scope="session")
def small_model():
    """Flags of a model that learns most sentences of the corpus within 45 steps."""
    return (
        "--model=transformer_tiny",
        "--vocab_size=310",
        "--max_source_length=24",
        "--max_target_length=24",
        "--batch_tokens=512",
        "--dropout=0.05",
    )


@pytest.fixture(scope="session")
def trained(corpus, small_model, run_command, tmp_path_factory):
    """45 steps of N = 2 in a process of its own, with checkpoints at 15, 30 and 45."""
    model_dir = tmp_path_factory.mktemp("trained") / "model"
    flags = (
        "--task=text",
        *(f"--{split}_files={corpus / split}.tsv" for split in ("train", "valid", "test")),
        *small_model,
        "--train_steps=45",
        "--eval_every=15",
        "--log_every=5",
        "--learning_rate=0.003",
        "--warmup_steps=10",
    )
    done = run_command("train", *flags, f"--model_dir={model_dir}")
    assert done.returncode == 0, done.stderr.decode()
    files = frozenset(os.listdir(model_dir))
    return Trained(model_dir, flags, done.stdout.decode(), done.stderr.decode(), files)


@pytest.fixture(scope="session")
def translator(trained):
    """The trained model, beam 4."""
    import tf_teaforn

    return tf_teaforn.load(trained.model_dir)


@pytest.fixture(scope="session")
def n_best_translator(trained):
    """The same at step 45, beam 3, two hypotheses each."""
    import tf_teaforn

    return tf_teaforn.load(trained.model_dir, "45", beam_size=3, n_best=2, alpha=1.0)


@pytest.fixture(scope="session")
def unshared(corpus, small_model, call_command, tmp_path_factory):
    """A run of N = 3 with own weights, which stops by itself as the learning rate is next to none.

    It names its files relatively, two a split, and exports its best checkpoint.
    """
    model_dir = tmp_path_factory.mktemp("unshared") / "model"
    flags = (
        "--task=text",
        *(f"--{split}_files={split}.en.gz,{split}.fr" for split in ("train", "valid", "test")),
        "--metric=rouge",
        *small_model,
        "--n=3",
        "--beam_size=1",
        "--noshared",
        "--train_steps=9",
        "--eval_every=1",
        "--learning_rate=1e-30",
        "--patience=1",
        "--export_on_best",
    )
    with contextlib.chdir(corpus):
        assert call_command("train", *flags, f"--model_dir={model_dir}") == 0
    return Trained(model_dir, flags, "", "")


@pytest.fixture(scope="session")
def exported(trained, run_command, tmp_path_factory):
    """(folder of versions, the `CompletedProcess` of bin/export), with the trained model."""
    export_dir = tmp_path_factory.mktemp("exported")
    flags = [f"--model_dir={trained.model_dir}", f"--export_dir={export_dir}"]
    done = run_command("export", *flags)
    assert done.returncode == 0, done.stderr.decode()
    return export_dir, done

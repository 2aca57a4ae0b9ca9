"""What files can make the package do: no code of theirs is ever run."""

import ast
import json
import lzma
from pathlib import Path

import pytest

from tf_teaforn import model_dir
from tf_teaforn.config import RunConfig
from tf_teaforn.data.documents import PreparedSource
from tf_teaforn.data.tokenizers import load_tokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.models.architecture import architecture_json, build_architecture
from tf_teaforn.models.catalog import build_model
from tf_teaforn.pretrained.importers import usable
from tf_teaforn.pretrained.tensors import TensorFile, check_sizes
from tools import gen_build

ROOT = Path(__file__).resolve().parents[1]
_SERIALIZERS = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "runpy", "shelve"}
_CALLS = {
    "__import__",
    "allow_pickle",
    "enable_unsafe_deserialization",
    "eval",
    "exec",
    "extractall",
    "import_module",
    "load_model",
    "popen",
    "register_unsafe",
    "system",
}
_ALLOWED = {
    # --module_import, the one way to run code of the user's.
    ("tf_teaforn/cli/app.py", "import_module"),
    # Names of a table beside it.
    ("tf_teaforn/__init__.py", "import_module"),
}


def violations(code, path):
    """What of the tree of `code` could run what a file says."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [getattr(node, "module", None) or ""]
            found += [name for name in names if name.split(".")[0] in _SERIALIZERS]
        if isinstance(node, ast.Call):
            # Keras' model.eval and the like are methods; the builtins are names.
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
            if name in _CALLS and (path, name) not in _ALLOWED:
                found.append(name)
            for keyword in node.keywords:
                value = getattr(keyword.value, "value", None)
                if keyword.arg == "allow_pickle" or (keyword.arg, value) in (
                    ("safe_mode", False),
                    ("shell", True),
                    ("trust_remote_code", True),
                ):
                    found.append(keyword.arg)
    return [f"{path}: {name}" for name in found]


def test_nothing_runs_what_a_file_says():
    files = [
        file
        for file in gen_build.source_files(ROOT)
        if file.parts[0] in ("bin", "tasks", "tf_teaforn")
    ]
    assert len(files) > 50
    texts = ((file.as_posix(), (ROOT / file).read_text()) for file in files)
    assert [line for path, text in texts for line in violations(text, path)] == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "np.load(path, allow_pickle=True)",
        "keras.saving.load_model(path)",
        "keras.layers.deserialize(x, safe_mode=False)",
        "importlib.import_module(name)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_a_violation_is_found(code):
    assert violations(code, "tf_teaforn/x.py")


@pytest.fixture(scope="module")
def architecture():
    """Content of an architecture.json."""
    return json.loads(architecture_json(build_model("transformer_tiny", 16)))


def hostile_objects(mark):
    """What Keras' format can name besides layers; `mark` would come to be if it were run."""
    command = f"touch {mark}"
    return {
        "a command": {"module": "os", "class_name": "system", "config": command},
        "no module": {"class_name": "system", "config": command},
        "a builtin": {"module": "builtins", "class_name": "eval", "config": {"source": "1"}},
        "a function": {"module": "builtins", "class_name": "function", "config": "system"},
        "a module of Keras": {
            "module": "keras.src.utils.file_utils",
            "class_name": "os.system",
            "config": {"command": command},
        },
        "a download": {
            "module": "keras.utils",
            "class_name": "get_file",
            "config": {"fname": str(mark), "origin": f"file://{__file__}"},
        },
        "a command of ours": {"module": "tf_teaforn.cli.train", "class_name": "main", "config": {}},
        "an unknown class": {"module": "evil", "class_name": "Layer", "config": {}},
        "a lambda": {
            "module": "keras.layers",
            "class_name": "Lambda",
            "config": {"function": {"class_name": "__lambda__", "config": {"code": "4wAAAAA="}}},
        },
        "a pickled module": {
            "module": "keras.layers",
            "class_name": "TorchModuleWrapper",
            "config": {"module": "gASVAAAAAAAAAAAu"},
        },
    }


@pytest.mark.parametrize("name", hostile_objects(""))
@pytest.mark.parametrize("where", ["alone", "inside"])
def test_hostile_architectures_are_refused(architecture, tmp_path, name, where):
    mark = tmp_path / "mark"
    content = {"registered_name": None, **hostile_objects(mark)[name]}
    if where == "inside":
        config = {**architecture["config"], "encoder": content}
        content = {**architecture, "config": config}
    with pytest.raises(UserError, match="^x/architecture.json does not describe a model"):
        build_architecture(json.dumps(content), "x/architecture.json")
    assert not mark.exists()


NESTED = "[" * 100_000


@pytest.mark.parametrize("text", [NESTED, "", "null", "[3]", '{"class_name": 5}'])
def test_texts_that_are_no_architecture(text):
    with pytest.raises(UserError, match="^x does not describe a model"):
        build_architecture(text, "x")


@pytest.mark.parametrize(
    "text",
    [
        NESTED,
        "null",
        '{"kind": ["sentencepiece"], "files": ["vocab.model"], "settings": {}}',
        '{"kind": "sentencepiece", "files": ["../secret"], "settings": {}}',
        '{"kind": "sentencepiece", "files": [".."], "settings": {}}',
        '{"kind": "sentencepiece", "files": ["/etc/passwd"], "settings": {}}',
        '{"kind": "sentencepiece", "files": ["gs://bucket/x"], "settings": {}}',
        '{"kind": "sentencepiece", "files": [5], "settings": {}}',
        '{"kind": "sentencepiece", "files": ["vocab.model"], "settings": [1]}',
        '{"kind": "sentencepiece", "files": ["vocab.model"], "settings": {"files": 1}}',
    ],
)
def test_hostile_tokenizers_are_refused(text, tmp_path):
    packed = ROOT / "tests" / "testdata" / "pegasus" / "spiece.model.xz"
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (tmp_path / "secret", folder / "vocab.model"):
        path.write_bytes(lzma.decompress(packed.read_bytes()))
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=f"^{folder}"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"task": ["text"]},
        {"data_dir": 5},
        {"task_options": ["metric"]},
        {"task_options": {"metric": {"a": 1}}},
        {"model": None},
        {"model": {"model": ["a"]}},
        {"teaforn": {"n": 0}},
        {"teaforn": {"n": True}},
        {"teaforn": {"discount": 1.5}},
        {"teaforn": {"discount": "0.5"}},
        {"teaforn": {"word_drop": 1.0}},
        {"data": {"max_source_length": 2**31}},
        {"training": {"learning_rate": 10**400}},
        {"decoding": {"beam_alpha": 10**400}},
    ],
)
def test_hostile_settings_are_refused(changes):
    content = {**json.loads(RunConfig(task="text").to_json()), **changes}
    with pytest.raises(UserError, match=r"^x/config\.json cannot be used: "):
        RunConfig.from_json(json.dumps(content), origin="x/config.json")


def test_settings_nested_too_deep():
    with pytest.raises(UserError, match="^x is not a configuration"):
        RunConfig.from_json(NESTED, origin="x")


def test_help_says_that_a_module_runs(call_command, capsys):
    assert call_command("train", "--help") == 0
    help_text = " ".join(capsys.readouterr().out.split())
    assert "This runs the module's code." in help_text.partition("--module_import")[2]


def test_names_in_a_config_lead_nowhere():
    """Architectures and tasks are looked up by name, never opened as paths."""
    from tf_teaforn.task import get_task

    for name in ("../x", "/etc/passwd", str(Path.cwd())):
        with pytest.raises(UserError, match="^Unknown model"):
            build_model(name, 16)
        with pytest.raises(UserError, match="^Unknown task"):
            get_task(name)


def test_a_preset_s_name_in_a_config_is_no_address(tmp_path, monkeypatch):
    """Of a model directory without the architecture.json that such a run writes."""
    monkeypatch.setattr("tf_teaforn.models.presets.load_backbone", lambda *_: pytest.fail("opened"))
    config = RunConfig(task="text").replace({"model": "keras_nlp:hf://x/y"})
    with pytest.raises(UserError, match="architecture.json is missing: the model of keras_nlp:hf"):
        model_dir.build_seq2seq(config, 16, tmp_path)


def test_sizes_beyond_a_file_s_take_no_memory():
    tensors = TensorFile("x", {"a": (10, 10)}, None)
    sizes = {"num_layers": 1, "hidden_dim": 10, "intermediate_dim": 20}
    check_sizes(tensors, 50, sizes)
    for change in ({"num_layers": 10**9}, {"hidden_dim": 10**6}, {"intermediate_dim": 10**9}):
        with pytest.raises(UserError, match="^x does not fit its settings, which ask for"):
            check_sizes(tensors, 50, {**sizes, **change})
    with pytest.raises(UserError, match="^x does not fit its settings"):
        check_sizes(tensors, 10**9, sizes)


@pytest.mark.parametrize(
    "shards", ["10000000000", '"x"', "0", "true", "[" * 100_000, '1, "splits": []']
)
def test_hostile_manifests(shards, tmp_path):
    (tmp_path / "prepared.json").write_text(f'{{"splits": {{"train": ""}}, "shards": {shards}}}')
    with pytest.raises(UserError, match=r"prepared\.json is damaged .*give bin/prepare's command"):
        PreparedSource(str(tmp_path)).files("train")


@pytest.mark.parametrize("error", [ZeroDivisionError, TypeError, KeyError, RecursionError])
def test_what_foreign_files_make_python_stumble_over(error):
    with pytest.raises(UserError, match="^--init_from=folder cannot be used: "), usable("folder"):
        raise error("x")

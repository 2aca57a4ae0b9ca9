"""The SavedModel, above all in a process that has neither this package nor Keras."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import prediction_log_pb2

import tf_teaforn
from tf_teaforn import model_dir as model_dirs
from tf_teaforn.errors import UserError
from tf_teaforn.export import export, export_all
from tf_teaforn.tf_backend import export as serving
from tf_teaforn.tf_backend.export import ServingModule, write_saved_model

SOURCES = [
    "I see the cat",
    "",
    "you have the bird",
    "\u2028 ",
    "see<n>the\nhorse",
    "I see \u2028 the horse " * 10,
]

EXAMPLES = {"sources": ["a", "b"], "targets": ["c", "d"]}

# What a user of an export does. Arguments: folder of versions; prints JSON.
SERVING_PROCESS = r"""
import json, os, sys, types

# tensorflow_text derives layers from a class of Keras when it is imported: it gets an empty one.
keras = types.ModuleType("keras")
keras.__version__ = "3.0"
keras.layers = types.SimpleNamespace(Layer=object)
keras.utils = types.SimpleNamespace(register_keras_serializable=lambda package: lambda cls: cls)
for name in ("keras", "keras._tf_keras", "keras._tf_keras.keras"):
    sys.modules[name] = keras
for name in ("tf_teaforn", "tasks", "keras_nlp", "keras_hub", "sentencepiece"):
    sys.modules[name] = None
folder, sources = sys.argv[1], json.loads(sys.argv[2])
answers = {}

# T5's notebooks/t5-deploy.ipynb, as it stands there.
import tensorflow as tf
import tensorflow_text  # Required to run exported model.

def load_predict_fn(model_path):
    if tf.executing_eagerly():
        print("Loading SavedModel in eager mode.", file=sys.stderr)
        imported = tf.saved_model.load(model_path, ["serve"])
        return lambda x: imported.signatures['serving_default'](
            tf.constant(x))['outputs'].numpy()

saved_model_path = os.path.join(folder, max(os.listdir(folder)))
predict_fn = load_predict_fn(saved_model_path)

def answer(question):
    return predict_fn([question])[0].decode('utf-8')

answers["one by one"] = [answer(source) for source in sources]

loaded = tf.saved_model.load(saved_model_path)
predict = loaded.signatures["serving_default"]
found = predict(inputs=tf.constant(sources))
answers["together"] = [text.decode() for text in found["outputs"].numpy()]
answers["scores"] = found["scores"].numpy().tolist()
none = predict(inputs=tf.constant([], tf.string))
answers["none"] = [none["outputs"].shape.as_list(), none["scores"].shape.as_list()]
token_ids = loaded.signatures["token_ids"]
ids = tf.ragged.constant(json.loads(sys.argv[3]), tf.int32).to_tensor()
found = token_ids(inputs=ids)
answers["ids"] = found["outputs"].numpy().tolist()
answers["ids_type"] = found["outputs"].dtype.name
answers["ids_scores"] = found["scores"].numpy().tolist()
modules = [name for name, module in sys.modules.items() if module is not None]
answers["keras"] = [name for name in modules if name.startswith("keras")]

graph = predict.graph.as_graph_def()
nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
answers["operations"] = sorted({node.op for node in nodes})

# saved_model_cli show --all
from tensorflow.python.tools import saved_model_cli
import contextlib, io
shown = io.StringIO()
sys.argv = ["saved_model_cli", "show", "--dir", saved_model_path, "--all"]
with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
    saved_model_cli.main()
answers["shown"] = shown.getvalue()

# saved_model_cli run
import numpy as np
sys.argv = ["saved_model_cli", "run", "--dir", saved_model_path, "--tag_set", "serve"]
sys.argv += ["--signature_def", "serving_default", "--outdir", ".", "--input_exprs"]
sys.argv += [f"inputs={sources}"]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    saved_model_cli.main()
answers["run"] = np.load("scores.npy").tolist()
print(json.dumps(answers))
"""


def ids_of(translator, texts):
    rows = translator.tokenizer.tokenize(texts).to_list()
    return [[*row, 1] for row in rows]


@pytest.fixture(scope="module")
def served(exported, translator, tmp_path_factory):
    """What a process without this package found in the export of bin/export."""
    arguments = [exported[0], json.dumps(SOURCES), json.dumps(ids_of(translator, SOURCES[:3:2]))]
    done = subprocess.run(
        [sys.executable, "-c", SERVING_PROCESS, *arguments],
        capture_output=True,
        cwd=tmp_path_factory.mktemp("elsewhere"),
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def test_answers_are_those_of_decode(served, translator):
    expected = translator.decode(SOURCES)
    assert served["together"] == [hypotheses[0][0] for hypotheses in expected]
    assert served["one by one"] == served["together"]
    scores = [hypotheses[0][1] for hypotheses in expected]
    np.testing.assert_allclose(served["scores"], scores, rtol=1e-4)
    assert served["together"][1] == served["together"][3] == "" != served["together"][0]


def test_no_input_no_output(served):
    assert served["none"] == [[0], [0]]


def test_token_ids(served, translator):
    assert served["ids_type"] == "int32"
    texts = translator.tokenizer.detokenize(np.array(served["ids"])).numpy()
    assert [text.decode() for text in texts] == served["together"][:3:2]
    np.testing.assert_allclose(served["ids_scores"], served["scores"][:3:2], rtol=1e-4)


def test_nothing_else_is_needed(served):
    # Those made up.
    assert served["keras"] == ["keras", "keras._tf_keras", "keras._tf_keras.keras"]
    custom = [name for name in served["operations"] if "Sentencepiece" in name or ">" in name]
    assert custom == ["SentencepieceDetokenizeOp", "SentencepieceTokenizeOp"]


def test_saved_model_cli(served):
    shown = served["shown"]
    assert "signature_def['serving_default']" in shown and "signature_def['token_ids']" in shown
    assert "dtype: DT_STRING\n        shape: (-1)" in shown
    assert "dtype: DT_INT32\n        shape: (-1, -1)" in shown
    assert "Method name is: tensorflow/serving/predict" in shown
    np.testing.assert_allclose(served["run"], served["scores"], rtol=1e-4)


def test_folder(exported, trained):
    export_dir, done = exported
    (version,) = export_dir.iterdir()
    # The time, however long ago.
    assert abs(int(version.name) - (version / "saved_model.pb").stat().st_mtime) < 3600
    assert done.stdout.decode() == f"Exported to {version}\n"
    best = json.loads((trained.model_dir / "best" / "state.json").read_text())
    assert json.loads((version / "assets.extra" / "decode.json").read_text()) == {
        "mode": "predict",
        "checkpoint": "best",
        "steps": [best["step"]],
        "task": "text",
        "max_source_length": 24,
        "max_target_length": 24,
        "static_batch": None,
        "static_length": None,
        "weights_dtype": "float32",
        "beam_size": 4,
        "alpha": 0.6,
        "n_best": 1,
        "max_length": None,
        "max_length_offset": 50,
        "min_length": 0,
        "no_repeat_ngram": 0,
        "temperature": 0.0,
        "sample_top_k": 0,
        "sample_top_p": 1.0,
        "seed": 0,
    }


def test_warmup_request(exported, trained):
    (version,) = exported[0].iterdir()
    path = version / "assets.extra" / "tf_serving_warmup_requests"
    answer = tf.saved_model.load(version).signatures["serving_default"]
    source = _valid_lines(trained)[0].split("\t")[0]
    (record,) = tf.data.TFRecordDataset(str(path)).as_numpy_iterator()
    request = prediction_log_pb2.PredictionLog.FromString(record).predict_log.request
    assert request.model_spec.signature_name == "serving_default"
    texts = tf.make_ndarray(request.inputs["inputs"])
    assert texts == [source.encode()]
    assert answer(inputs=tf.constant(texts))["outputs"].shape == [1]


def _valid_lines(trained):
    (path,) = (flag[14:] for flag in trained.flags if flag.startswith("--valid_files="))
    return Path(path).read_text().splitlines()


@pytest.mark.parametrize(("n", "shared"), [(1, True), (3, True), (3, False)])
def test_size_is_that_of_the_model_served(translator, tmp_path, n, shared):
    tokenizer = translator.tokenizer
    settings = {"num_layers": 1, "hidden_dim": 8, "intermediate_dim": 16, "num_heads": 2}
    seq2seq = tf_teaforn.build_model("transformer_tiny", tokenizer.vocabulary_size, **settings)
    model = tf_teaforn.TeaForN(seq2seq, n=n, shared=shared)
    model.compile(optimizer="adam")
    model.optimizer.build(model.trainable_variables)
    module = ServingModule(model.seq2seq, tokenizer, translator.config, 24, 24)
    folder = write_saved_model(module, tmp_path, {}, EXAMPLES, "score")
    loaded = tf.saved_model.load(folder)
    # Embedding; four projections an attention; two matrices with biases a feed-forward; each
    # sublayer's norm and the stacks' own.
    numbers = tokenizer.vocabulary_size * 8 + 3 * 4 * 64 + 2 * (2 * 8 * 16 + 16 + 8) + 7 * 2 * 8
    assert len(loaded.weights) == 1 + 3 * 4 + 2 * 4 + 7 * 2
    variables = str(folder / "variables" / "variables")
    stored = [
        tf.train.load_variable(variables, name)
        for name, _ in tf.train.list_variables(variables)
        if name != "_CHECKPOINTABLE_OBJECT_GRAPH"
    ]
    assert sum(value.nbytes for value in stored) == 4 * numbers


def test_texts_are_searched_in_few_lengths(translator, monkeypatch):
    tokenizer, lengths = translator.tokenizer, []
    module = ServingModule(translator.seq2seq, tokenizer, translator.config, 20, 24)

    class Searched(Exception):
        pass

    def search(seq2seq, inputs, config):
        lengths.append(inputs["encoder_token_ids"].shape[1])
        raise Searched

    monkeypatch.setattr("tf_teaforn.tf_backend.inference.search", search)
    texts = ["e" * count for count in range(1, 40)]
    expected = []
    for text in texts:
        with pytest.raises(Searched):
            module._predict(tf.constant([text]))
        (ids,) = ids_of(translator, [text])
        expected.append(min(math.ceil(len(ids) / 8) * 8, 20))
    assert lengths == expected and {*lengths} == {8, 16, 20}


def test_score_mode(trained, translator, tmp_path):
    folder = export(trained.model_dir, tmp_path, mode="score")
    score = tf.saved_model.load(folder).signatures
    assert [*score] == ["serving_default"]
    targets = ["je vois le chat", "", "<n>", "x", "le chat", "le chien " * 20]
    scores = score["serving_default"](inputs=tf.constant(SOURCES), targets=tf.constant(targets))
    assert [*scores] == ["scores"]
    np.testing.assert_allclose(scores["scores"], translator.score(SOURCES, targets), rtol=1e-4)


def test_n_best(trained, n_best_translator, tmp_path):
    folder = export(trained.model_dir, tmp_path, "45", beam_size=3, n_best=2, alpha=1.0)
    found = tf.saved_model.load(folder).signatures["serving_default"](tf.constant(SOURCES))
    expected = n_best_translator.decode(SOURCES)
    outputs = [[text.decode() for text in row] for row in found["outputs"].numpy()]
    assert outputs == [[text for text, _, _ in hypotheses] for hypotheses in expected]
    scores = [[score for _, score, _ in hypotheses] for hypotheses in expected]
    np.testing.assert_allclose(found["scores"], scores, rtol=1e-4)


def test_scores_of_missing_hypotheses_are_finite(n_best_translator):
    """JSON has no infinity."""
    config = dataclasses.replace(n_best_translator.config, beam_size=3, n_best=3)
    translator = n_best_translator
    module = ServingModule(translator.seq2seq, translator.tokenizer, config, 24, 24)
    found = module._ranked(
        tf.constant([["a", "", ""]]), tf.constant([[-1.5, -math.inf, -math.inf]])
    )
    np.testing.assert_array_equal(found["scores"], [[-1.5, tf.float32.min, tf.float32.min]])


def test_static_signatures_and_bfloat16_weights(trained, translator, tmp_path):
    """Both in one export: weights rounded to bfloat16, search compiled for 3 inputs of 16."""
    folder = export(
        trained.model_dir,
        tmp_path,
        beam_size=2,
        max_length=16,
        static_batch=3,
        static_length=16,
        weights_dtype="bfloat16",
    )
    rounded = tf_teaforn.load(trained.model_dir, beam_size=2, max_length=16)
    size = sum(weight.numpy().nbytes for weight in rounded.seq2seq.weights)
    for weight in rounded.seq2seq.weights:
        weight.assign(tf.cast(tf.cast(weight.value, tf.bfloat16), tf.float32))
    sources = ["I see the cat", "", "you have the bird"]
    expected = rounded.decode(sources)
    signatures = tf.saved_model.load(folder).signatures
    assert sorted(signatures) == ["serving_default", "static", "static_token_ids", "token_ids"]
    for name in ("serving_default", "static"):
        found = signatures[name](inputs=tf.constant(sources))
        outputs = [text.decode() for text in found["outputs"].numpy()]
        assert outputs == [hypotheses[0][0] for hypotheses in expected]
        scores = [hypotheses[0][1] for hypotheses in expected]
        np.testing.assert_allclose(found["scores"], scores, rtol=1e-4)
    ids = np.zeros((3, 16), "int32")
    for row, source in zip(ids, ids_of(translator, sources), strict=True):
        row[: len(source)] = source
    compiled = signatures["static_token_ids"](inputs=tf.constant(ids))
    dynamic = signatures["token_ids"](inputs=tf.constant(ids))
    np.testing.assert_array_equal(compiled["outputs"], dynamic["outputs"])
    # As TF Serving fills up shorter requests.
    filled = np.where(ids == 0, ids[0, 0], ids)
    for name, found in (("static_token_ids", compiled), ("token_ids", dynamic)):
        answer = signatures[name](inputs=tf.constant(filled))
        np.testing.assert_array_equal(answer["outputs"], found["outputs"])
        np.testing.assert_allclose(answer["scores"], found["scores"], rtol=1e-4)
    ids[1, 2] = translator.tokenizer.vocabulary_size
    for name in ("token_ids", "static_token_ids"):
        with pytest.raises(tf.errors.InvalidArgumentError, match="inputs: an id is outside of the"):
            signatures[name](inputs=tf.constant(ids))
    functions = signatures["static"].graph.as_graph_def().library.function
    assert any(function.attr["_XlaMustCompile"].b for function in functions)

    # Sources longer than the shape are cut before their end of sentence.
    long = "the dog " * 10
    cut = translator.tokenizer.tokenize([long])[:, :15]
    cut = translator.tokenizer.detokenize(cut.to_tensor()).numpy()[0].decode()
    answers = [
        signatures["static"](inputs=tf.constant([text, "", ""]))["outputs"][0].numpy()
        for text in (long, cut)
    ]
    assert answers[0] == answers[1]

    variables = str(folder / "variables" / "variables")
    stored = [
        tf.train.load_variable(variables, name)
        for name, _ in tf.train.list_variables(variables)
        if name != "_CHECKPOINTABLE_OBJECT_GRAPH"
    ]
    assert sum(value.nbytes for value in stored) * 2 == size
    plain = translator.score(sources, [hypotheses[0][0] for hypotheses in expected])
    np.testing.assert_allclose(
        [rows[0][1] for rows in expected][::2], plain[::2], rtol=0.05, atol=0.02
    )


def test_all_checkpoints(trained, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tf_teaforn.export, "write_saved_model", lambda *args: args)
    steps, written = zip(*export_all(trained.model_dir, tmp_path, beam_size=1), strict=True)
    assert steps == (15, 30, 45)
    assert [details["steps"] for _, _, details, _, _ in written] == [[15], [30], [45]]
    weights = [module.weights[0].numpy() for module, *_ in written]
    assert not np.array_equal(weights[0], weights[1])
    # One that a running training deletes meanwhile.
    folder = shutil.copytree(trained.model_dir, tmp_path / "running")
    found = []
    with caplog.at_level("WARNING"):
        for step, _ in export_all(folder, tmp_path, beam_size=1):
            found.append(step)
            shutil.rmtree(folder / "checkpoints" / "30", ignore_errors=True)
    assert found == [15, 45] and "checkpoint 30 is gone and not exported: --ch" in caplog.text
    shutil.copy(trained.model_dir / "config.json", tmp_path)
    with pytest.raises(UserError, match="^--checkpoint=all: --model_dir=.* has no checkpoint"):
        list(export_all(tmp_path, tmp_path / "x"))


def test_refusals_come_before_the_model_is_loaded(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(model_dirs, "load_seq2seq", lambda *args: pytest.fail("loaded"))
    with pytest.raises(UserError, match="^--mode=serve: write predict or score"):
        export(trained.model_dir, tmp_path / "x", mode="serve")
    with pytest.raises(UserError, match="^--n_best=5 exceeds --beam_size=4"):
        export(trained.model_dir, tmp_path / "x", n_best=5)
    for settings, message in (
        ({"static_batch": 8}, "--static_batch=8 alone makes no shape: add --static_length"),
        ({"static_length": 8}, "--static_length=8 alone makes no shape: add --static_batch"),
        ({"static_batch": 0, "static_length": 8}, "--static_batch=0: write 1 or more"),
        ({"static_batch": 8, "static_length": 1}, "--static_length=1: write 2 or more"),
        ({"static_batch": 8, "static_length": 8, "mode": "score"}, "--mode=score has no static"),
        ({"weights_dtype": "int8"}, "--weights_dtype=int8: write float32 or bfloat16"),
    ):
        with pytest.raises(UserError, match=f"^{message}"):
            export(trained.model_dir, tmp_path / "x", **settings)
    assert not (tmp_path / "x").exists()


class Doubler(tf.Module):
    def signatures(self, mode):
        number = tf.TensorSpec([], tf.float32)
        return {"serving_default": tf.function(lambda x: {"y": 2 * x}, input_signature=[number])}


def test_versions_rise(tmp_path):
    later = int(time.time()) + 100_000
    (tmp_path / str(later)).mkdir()
    (tmp_path / "notes").mkdir()
    folders = [write_saved_model(Doubler(), tmp_path, {}, EXAMPLES, "score") for _ in range(2)]
    assert [folder.name for folder in folders] == [str(later + 1), str(later + 2)]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"notes", str(later), str(later + 1), str(later + 2)}


def test_two_exports_at_a_time_are_two_versions(tmp_path, monkeypatch):
    """The second begins and ends where the first has found its number and not yet taken it."""
    rename, folders = os.rename, []
    monkeypatch.setattr(serving, "time", types.SimpleNamespace(time=lambda: 7))

    def rename_late(source, destination):
        if not folders:
            folders.append(None)
            folders.append(write_saved_model(Doubler(), tmp_path, {"of": 2}, EXAMPLES, "score"))
        rename(source, destination)

    monkeypatch.setattr(os, "rename", rename_late)
    first = write_saved_model(Doubler(), tmp_path, {"of": 1}, EXAMPLES, "score")
    second = folders[1]
    assert (second.name, first.name) == ("7", "8")
    for folder, number in ((first, 1), (second, 2)):
        details = json.loads((folder / "assets.extra" / "decode.json").read_text())
        assert details == {"of": number}
        assert (
            tf.saved_model.load(folder).signatures["serving_default"](x=tf.constant(2.0))["y"] == 4
        )


def test_everything_is_flushed_before_it_is_renamed(tmp_path, monkeypatch):
    events = []
    rename = os.rename

    def record_fsync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    def record_rename(source, destination):
        events.append("rename")
        rename(source, destination)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    folder = write_saved_model(Doubler(), tmp_path, {}, EXAMPLES, "score")
    *flushed, renamed, parent = events
    files = {f"{path.relative_to(folder)}" for path in Path(folder).rglob("*")}
    assert "saved_model.pb" in files and "variables/variables.index" in files
    (temporary,) = {path for path in flushed if path.endswith(".tmp")}
    assert sorted(flushed) == sorted([temporary, *(f"{temporary}/{name}" for name in files)])
    assert (renamed, parent) == ("rename", str(tmp_path))


def test_a_failed_export_leaves_nothing(tmp_path, monkeypatch):
    def fail(module, folder, signatures):
        tf.io.gfile.makedirs(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(tf.saved_model, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        write_saved_model(Doubler(), tmp_path, {}, EXAMPLES, "score")
    assert list(tmp_path.iterdir()) == []

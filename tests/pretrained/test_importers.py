"""--init_from and --freeze through the commands; what a model directory then holds."""

import json
import shutil

import numpy as np
import pytest
import tensorflow as tf

import tf_teaforn
from tf_teaforn import checkpoint
from tf_teaforn.data.tokenizers import save_tokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.models.architecture import architecture_json, build_architecture
from tf_teaforn.pretrained.importers import open_folder
from tf_teaforn.testing import tiny_model


@pytest.fixture(scope="module")
def flags(corpus):
    return (
        "--task=text",
        *(f"--{split}_files={corpus / split}.tsv" for split in ("train", "valid", "test")),
        "--max_source_length=24",
        "--max_target_length=24",
        "--batch_tokens=512",
        "--eval_every=2",
        "--learning_rate=0.003",
        "--warmup_steps=1",
        "--beam_size=1",
    )


@pytest.fixture(scope="module")
def fine_tuned(flags, pegasus_folder, call_command, eagerly, tmp_path_factory):
    """Two steps of PEGASUS, N = 2, encoder frozen; the folder it came from is gone."""
    folder = tmp_path_factory.mktemp("fine_tuned")
    source = shutil.copytree(pegasus_folder, folder / "pegasus")
    command = ("train", *flags, "--n=2", "--noshared", "--freeze=encoder,embedding")
    command += (f"--init_from={source}", f"--model_dir={folder / 'model'}", "--train_steps=2")
    with eagerly():
        assert call_command(*command) == 0
    shutil.rmtree(source)
    return folder / "model", command


def weights_of(model):
    return {weight.path: weight.numpy() for weight in model.weights}


def test_frozen_parts_stay_and_the_rest_learns(fine_tuned, pegasus_folder):
    model_dir, _ = fine_tuned
    start = weights_of(open_folder(pegasus_folder).build())
    weights, optimizer, _ = checkpoint.load_training(model_dir)
    assert set(start) < set(weights), "a checkpoint holds everything"
    for name, value in start.items():
        frozen = not name.startswith("seq2seq/decoder/")
        assert np.array_equal(weights[name], value) == frozen, name
    decoders = sum(value.size for name, value in weights.items() if "decoder" in name)
    slots = sum(value.size for name, value in optimizer.items() if "optimizer/" in name)
    assert 2 * decoders <= slots < 2 * decoders + 10, "only what is trained has moments"


def test_the_model_dir_needs_nothing_else(fine_tuned, call_command, tmp_path, capsys, caplog):
    model_dir, command = fine_tuned
    config = json.loads((model_dir / "config.json").read_text())
    assert config["model"]["model"] == "pegasus" and config["model"]["vocab_size"] == 273
    description = json.loads((model_dir / "tokenizer.json").read_text())
    assert description["kind"] == "pegasus" and (model_dir / "spiece.model").exists()
    caplog.set_level("INFO", logger="tf_teaforn")
    assert call_command(*command) == 0
    weights, _, _ = checkpoint.load_training(model_dir)
    frozen = [value.size for name, value in weights.items() if "decoder" not in name]
    line = f"(--freeze=encoder,embedding): {len(frozen)} weights of {sum(frozen):,} numbers; "
    assert line in caplog.text
    capsys.readouterr()
    assert call_command("evaluate", f"--model_dir={model_dir}", "--split=validation") == 0
    assert "bleu" in capsys.readouterr().out
    assert call_command("export", f"--model_dir={model_dir}", f"--export_dir={tmp_path}") == 0
    (version,) = tmp_path.iterdir()
    serve = tf.saved_model.load(str(version)).signatures["serving_default"]
    texts = ["I see the cat", ""]
    outputs = [text.decode() for text in serve(tf.constant(texts))["outputs"].numpy()]
    assert outputs == tf_teaforn.load(model_dir)(texts)


def test_from_a_model_dir(fine_tuned, flags, call_command, eagerly, tmp_path):
    """What came from outside goes on as what it is, with other settings."""
    model_dir, _ = fine_tuned
    command = ("train", *flags, "--n=1", "--dropout=0.2", "--train_steps=1", "--vocab_size=273")
    command += ("--learning_rate=1e-9", f"--model_dir={tmp_path / 'next'}")
    with eagerly():
        assert call_command(*command, f"--init_from={model_dir}@2") == 0
    start, _ = checkpoint.load_weights(model_dir, "2")
    weights, _ = checkpoint.load_weights(tmp_path / "next", "latest")
    assert set(weights) == {name for name in start if name.startswith("seq2seq/")}
    for name, value in weights.items():
        np.testing.assert_allclose(value, start[name], atol=1e-7)
    translator = tf_teaforn.load(tmp_path / "next")
    assert translator.seq2seq.encoder.settings["dropout"] == 0.2
    assert translator.seq2seq.encoder.settings["attention_dropout"] == 0.0


def test_from_a_model_of_ours(trained):
    pretrained = open_folder(f"{trained.model_dir}@30")
    weights, _ = checkpoint.load_weights(trained.model_dir, "30")
    assert pretrained.model == "transformer_tiny"
    built = weights_of(pretrained.build(dtype="mixed_bfloat16", dropout=0.3))
    assert all(np.array_equal(value, weights[name]) for name, value in built.items())
    with pytest.raises(UserError, match="has no checkpoint 31; steps saved: 15, 30, 45. Write .*@"):
        open_folder(f"{trained.model_dir}@31")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--vocab_size=300",), "--vocab_size=300, but --init_from={} has 273"),
        (("--model=transformer_tiny",), "--model=transformer_tiny, but --init_from={} has pegasus"),
        (("--vocab={vocab}",), "is not the vocabulary of --init_from={}"),
        (("--freeze=encoder,decoders",), "--freeze=encoder,decoders: write one or two of"),
        (("--freeze=encoder,embedding,decoder",), "write one or two of embedding, encoder"),
    ],
)
def test_flags_that_contradict(
    more, message, flags, pegasus_folder, trained, call_command, tmp_path, capsys
):
    more = [flag.format(vocab=trained.model_dir / "vocab.model") for flag in more]
    model_dir = tmp_path / "model"
    command = ("train", *flags, f"--init_from={pegasus_folder}", *more, f"--model_dir={model_dir}")
    assert call_command(*command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message.format(pegasus_folder) in line
    assert not model_dir.exists()


def test_a_run_that_had_begun_from_a_model_goes_on_so(
    flags, small_model, pegasus_folder, call_command, tmp_path, capsys
):
    """Killed before its settings were written, so that only the vocabulary tells."""
    save_tokenizer(open_folder(pegasus_folder).tokenizer, tmp_path)
    assert call_command("train", *flags, *small_model, f"--model_dir={tmp_path}") == 2
    assert "is that of a run with --init_from" in capsys.readouterr().err


def test_folders_without_a_model(tmp_path):
    with pytest.raises(UserError, match="--init_from=.*nowhere: there is no such folder"):
        open_folder(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds none of the models .* a Hugging Face folder"):
        open_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="config.json cannot be read"):
        open_folder(tmp_path)


def test_architecture_round_trip():
    model = tiny_model(norm="post", attention_dropout=0.1, dropout=0.2)
    text = architecture_json(model)
    copy = build_architecture(text, "here")
    assert copy.get_config() == model.get_config()
    assert [w.path for w in copy.weights] == [w.path for w in model.weights]
    changed = build_architecture(text, "here", dtype="mixed_bfloat16", dropout=0.3)
    layers = (changed.embedding, changed.encoder, changed.decoder)
    assert {layer.compute_dtype for layer in layers} == {"bfloat16"}
    settings = changed.decoder.settings
    rates = [settings[f"{name}dropout"] for name in ("", "attention_", "activation_")]
    assert rates == [0.3, 0.3, 0.0]


@pytest.mark.parametrize(
    ("module", "class_name"),
    [("os", "system"), ("builtins", "function"), ("subprocess", "Popen"), (None, "Thing")],
)
def test_an_architecture_runs_no_foreign_code(module, class_name):
    content = json.loads(architecture_json(tiny_model()))
    content["config"]["encoder"] = {
        "module": module,
        "class_name": class_name,
        "config": "true",
        "registered_name": class_name,
    }
    with pytest.raises(UserError, match="here does not describe a model"):
        build_architecture(json.dumps(content), "here")
    for text in ("{", "[]", '{"class_name": "Dense", "module": "keras.layers", "config": {}}'):
        with pytest.raises(UserError, match="here does not describe a model"):
            build_architecture(text, "here")

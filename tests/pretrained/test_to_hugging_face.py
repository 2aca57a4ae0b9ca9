"""The folder for Hugging Face transformers: names, shapes, values, and back through our importer.

examples/check_transformers.py compares logits where transformers is installed.
"""

import contextlib
import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
from keras import ops

from tests.numpy_transformer import position_signal
from tests.testdata.lines import plain_lines
from tf_teaforn import testing
from tf_teaforn.data.tokenizer import Tokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.export import export_transformers
from tf_teaforn.models.catalog import build_model
from tf_teaforn.pretrained import to_hugging_face
from tf_teaforn.pretrained.importers import open_folder
from tf_teaforn.pretrained.to_hugging_face import write_folder
from tf_teaforn.pretrained.transformer import build_transformer

SIZES = {"num_layers": 2, "hidden_dim": 8, "intermediate_dim": 12, "num_heads": 2}


@pytest.fixture(scope="module")
def tokenizer(trained):
    return Tokenizer.load(trained.model_dir / "vocab.model")


def tensors_of(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


def shapes_of(folder, but=()):
    return {n: v.shape for n, v in tensors_of(folder).items() if not n.endswith(but)}


def test_names_and_shapes_are_those_of_transformers(tokenizer, pegasus_folder, tmp_path):
    """As save_pretrained wrote them for its PEGASUS in tests/testdata, of the same sizes."""
    theirs = json.loads((pegasus_folder / "config.json").read_text())
    names = {"d_model": "hidden_dim", "encoder_ffn_dim": "intermediate_dim"}
    names |= {"encoder_layers": "num_layers", "encoder_attention_heads": "num_heads"}
    sizes = {ours: theirs[name] for name, ours in names.items()}
    model = testing.tiny_model(vocabulary_size=theirs["vocab_size"], **sizes)
    length = theirs["max_position_embeddings"]
    write_folder(model, tokenizer, tmp_path / "out", max_length=length)
    positions = "embed_positions.weight"
    assert shapes_of(tmp_path / "out", positions) == shapes_of(pegasus_folder, positions)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    for name in ("d_model", "decoder_layers", "decoder_ffn_dim", "encoder_attention_heads"):
        assert config[name] == theirs[name]


@pytest.mark.parametrize("layout", ["half_split", "interleaved", "tensor2tensor"])
def test_pegasus_gets_the_table_of_positions_and_zero_biases(layout, tokenizer, tmp_path):
    model = testing.tiny_model(vocabulary_size=tokenizer.vocabulary_size, position_signal=layout)
    write_folder(model, tokenizer, tmp_path / "out", max_length=30)
    tensors = tensors_of(tmp_path / "out")
    expected = position_signal(np.arange(30), width=4, layout=layout)
    for part in ("encoder", "decoder"):
        table = tensors[f"model.{part}.embed_positions.weight"]
        np.testing.assert_allclose(table, expected, atol=1e-5)
    assert not tensors["model.decoder.layers.0.encoder_attn.q_proj.bias"].any()
    assert tensors["model.decoder.layers.0.fc1.bias"].any()
    kernel = ops.convert_to_numpy(model.decoder.blocks[0][0].query.kernel)
    found = tensors["model.decoder.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(found, kernel.T)


def test_a_run_comes_back_as_marian(tokenizer, tmp_path):
    settings = {**SIZES, "norm": "post", "attention_bias": True, "activation": "silu"}
    model = testing.tiny_model(vocabulary_size=tokenizer.vocabulary_size, **settings)
    write_folder(model, tokenizer, tmp_path / "out", max_length=50, beam_size=3)
    assert list(tmp_path.glob("*.partial")) == []
    back = open_folder(tmp_path / "out")
    again = back.build()
    for ours, weight in zip(model.weights, again.weights, strict=True):
        assert ours.path == weight.path
        np.testing.assert_array_equal(ours, weight)
    lines = [line for line in plain_lines(40) if "  " not in line]
    expected = tokenizer.encode(lines, 99)
    np.testing.assert_array_equal(back.tokenizer.encode(lines, 99), expected)
    assert back.tokenizer.detokenize(expected).numpy().tolist() == [s.encode() for s in lines]
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["num_beams"] == 3 and generation["decoder_start_token_id"] == 0


def test_parts_of_different_depths(tokenizer, tmp_path):
    """transformers takes `num_hidden_layers` for the encoder's."""
    size, one = tokenizer.vocabulary_size, {**SIZES, "num_layers": 1, "activation": "relu"}
    model = build_transformer(size, {**one, "num_layers": 3}, one, dtype=None, scaled=True)
    write_folder(model, tokenizer, tmp_path / "out", max_length=9)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["encoder_layers"], config["decoder_layers"]) == (3, 1)
    assert config.get("num_hidden_layers", 3) == 3


def test_a_failed_export_leaves_nothing(tokenizer, tmp_path, monkeypatch):
    def fail(path):
        assert {file.name for file in path.iterdir()} >= {"config.json", "model.safetensors"}
        raise KeyboardInterrupt

    monkeypatch.setattr(to_hugging_face, "flush_folder", fail)
    model = testing.tiny_model(vocabulary_size=tokenizer.vocabulary_size, **SIZES)
    with pytest.raises(KeyboardInterrupt):
        write_folder(model, tokenizer, tmp_path / "out" / "model", max_length=50)
    assert list(tmp_path.glob("out/*")) == []


def test_pegasus_comes_back(pegasus_folder, tmp_path):
    pretrained = open_folder(pegasus_folder)
    model = pretrained.build()
    write_folder(model, pretrained.tokenizer, tmp_path / "out", max_length=50)
    again = open_folder(tmp_path / "out").build()
    for ours, weight in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(ours, weight)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("rnn_base", {"num_layers": 1, "hidden_dim": 4}, "a RnnEncoder has no counterpart"),
        ("transformer_tiny", {"activation": "tanh"}, "activation tanh"),
        ("transformer_tiny", {"norm_epsilon": 1e-3}, "norm_epsilon 0.001"),
        (
            "transformer_tiny",
            {"norm": "post", "position_signal": "interleaved"},
            "norm post with position_signal interleaved",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused(model, settings, message, tmp_path):
    built = build_model(model, 20, **settings)
    with pytest.raises(UserError, match=message):
        write_folder(built, None, tmp_path / "out", max_length=9)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "what"), [({"norm": "post"}, "norms"), ({"activation": "gelu"}, "activations")]
)
def test_parts_that_differ_are_refused(settings, what, tmp_path):
    decoder = {**SIZES, "activation": "relu"}
    model = build_transformer(20, {**decoder, **settings}, decoder, dtype=None, scaled=True)
    with pytest.raises(UserError, match=f"an encoder and a decoder of different {what} has no"):
        write_folder(model, None, tmp_path / "out", max_length=9)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("decode_length", "positions", "tokens"), [(None, 74, 74), (8, 74, 9), (99, 100, 100)]
)
def test_generation_stops_where_the_search_does(
    trained, tmp_path, decode_length, positions, tokens
):
    """24 subwords a source; the start token counts there."""
    folder = shutil.copytree(trained.model_dir, tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    config["decoding"]["decode_length"] = decode_length
    (folder / "config.json").write_text(json.dumps(config))
    export_transformers(folder, tmp_path / "out")
    generation, config = (
        json.loads((tmp_path / "out" / name).read_text())
        for name in ("generation_config.json", "config.json")
    )
    assert generation["max_length"] == tokens
    assert config["max_position_embeddings"] == positions


def test_the_command(trained, call_command, tmp_path, capsys):
    flags = (f"--model_dir={trained.model_dir}", "--format=transformers")
    out = f"--export_dir={tmp_path / 'out'}"
    assert call_command("export", *flags, out, "--checkpoint=45") == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "source.spm",
        "target.spm",
        "tokenizer_config.json",
        "vocab.json",
    }
    capsys.readouterr()
    assert call_command("export", *flags, out) == 2
    assert "is not empty" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    with contextlib.chdir(tmp_path / "empty"):
        for current in (".", str(tmp_path / "empty")):
            assert call_command("export", *flags, f"--export_dir={current}") == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.endswith(
                f"--export_dir={current} is the current folder: name one inside it."
            )
    assert list((tmp_path / "empty").iterdir()) == []
    assert call_command("export", *flags, out, "--weights_dtype=bfloat16") == 2
    assert "--format=transformers: leave out --weights_dtype" in capsys.readouterr().err

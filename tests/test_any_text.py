"""Any Unicode text goes through decoding and an exported model, and line i answers line i."""

import hypothesis
import pytest
import tensorflow as tf
import tensorflow_text  # noqa: F401 (operators of the exported model)
from hypothesis import strategies as st

_settings = hypothesis.settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
# All characters but the newline, which ends a line, and NUL, which files may not have.
_lines = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="\n\0"), max_size=12),
    min_size=1,
    max_size=4,
)


@_settings
@hypothesis.given(lines=_lines)
@hypothesis.example(lines=["\ufeff", "a\u2028b\x0b\x0c\x85c", "\r", "\u200b<n>\U0010ffff", "𝔘 ا"])
def test_decoding(lines, trained, translator, call_command, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tf_teaforn.inference.load", lambda *args, **fields: translator)
        (tmp_path / "in").write_bytes("".join(f"{line}\n" for line in lines).encode())
        flags = [f"--input={tmp_path}/in", f"--output={tmp_path}/out"]
        assert call_command("decode", f"--model_dir={trained.model_dir}", *flags) == 0
    answers = (tmp_path / "out").read_bytes().decode().split("\n")
    assert answers.pop() == "" and len(answers) == len(lines)
    texts = [line.removesuffix("\r") for line in lines]
    texts[0] = texts[0].removeprefix("\ufeff")
    blank = [not text.replace("<n>", "\n").strip() for text in texts]
    assert all(answer == "" for answer, none in zip(answers, blank, strict=True) if none)
    assert answers == [text.replace("\n", "<n>") for text in translator(texts)]


@pytest.fixture(scope="module")
def served(exported):
    """The exported model in this process."""
    (version,) = exported[0].iterdir()
    return tf.saved_model.load(str(version))


@_settings
@hypothesis.given(lines=_lines)
@hypothesis.example(lines=["\ufeff", "a\u2028b\x0b\x0c\x85c\0", "", "\u200b<n>\U0010ffff", "𝔘 ا"])
def test_an_exported_model(lines, served, translator):
    outputs = served.signatures["serving_default"](inputs=tf.constant(lines))["outputs"]
    answers = [answer.decode() for answer in outputs.numpy()]
    assert answers == translator(lines)

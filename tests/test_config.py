"""Settings: ranges, JSON, differences."""

import dataclasses
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from tf_teaforn.config import RunConfig, field_type, settings
from tf_teaforn.errors import UserError

CONFIG = RunConfig(task="text", task_options={"metric": "rouge"}, data_dir="/data").replace(
    {"n": 3, "discount": 1, "shared": False, "patience": 4, "learning_rate": 2e-3}
)


def test_every_setting_has_one_name_a_type_and_a_help_text():
    fields = settings()
    assert len({field.name for field in fields}) == len(fields)
    assert {field_type(field) for field in fields} == {bool, int, float, str}
    assert all(field.metadata["help"].endswith(".") for field in fields)


def test_defaults_are_allowed():
    defaults = {field.name: field.default for field in settings()}
    assert RunConfig(task="text").replace(defaults) == RunConfig(task="text")


def test_replace():
    assert (CONFIG.teaforn.n, CONFIG.teaforn.shared, CONFIG.training.patience) == (3, False, 4)
    assert CONFIG.training.learning_rate == 0.002
    assert CONFIG.model == RunConfig(task="text").model


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("vocab_size", [0, "8000", 1e3, None], [1]),
        ("dropout", [-0.1, 1.0, float("nan")], [0, 0.5, None]),
        ("precision", ["float16", None], ["mixed_bfloat16"]),
        ("n", [2.0, True, None], [1]),
        ("shared", [1, "true"], [True, False]),
        ("max_source_length", [1], [2]),
        ("max_target_length", [1], [2]),
        ("batching", ["pad", None], ["fixed", "pack"]),
        ("batch_tokens", [0], [1]),
        ("train_steps", [0, -1], [1]),
        ("seed", [-1, 2**32], [0, 2**32 - 1]),
        ("optimizer", ["Adam"], ["adafactor"]),
        ("learning_rate", [0, -1e-3, float("inf"), float("nan")], [1e-9, 1]),
        ("clip_norm", [0, -1.0, float("inf")], [0.1, None]),
        ("weight_decay", [-0.1, float("inf"), None], [0, 0.01]),
        ("warmup_steps", [-1], [0]),
        ("eval_every", [0], [1]),
        ("checkpoint_every", [0], [1]),
        ("keep", [0], [1]),
        ("patience", [0], [1, None]),
        ("log_every", [0], [1]),
        ("beam_size", [0], [1]),
        ("beam_alpha", [float("nan"), float("inf")], [0, -1.5]),
        ("decode_length", [0], [1, None]),
    ],
)
def test_allowed_values(name, wrong, right):
    config = RunConfig(task="text")
    for value in wrong:
        with pytest.raises(UserError, match=rf"^--{name}={value}: write .+\.$"):
            config.replace({name: value})
    for value in right:
        config.replace({name: value})


def test_unknown_setting():
    with pytest.raises(UserError, match=r"^Unknown setting: lr, momentum\.$"):
        CONFIG.replace({"momentum": 0.9, "lr": 1.0, "n": 1})


def test_json_round_trip():
    assert RunConfig.from_json(CONFIG.to_json()) == CONFIG
    flat = json.loads(CONFIG.to_json())
    assert flat["task"] == "text" and flat["teaforn"]["n"] == 3


def test_json_without_a_setting_takes_its_default():
    content = json.loads(CONFIG.to_json())
    del content["training"]["patience"]
    training = dataclasses.replace(CONFIG.training, patience=None)
    assert RunConfig.from_json(json.dumps(content)) == dataclasses.replace(
        CONFIG, training=training
    )


def changed(**changes):
    return json.dumps({**json.loads(CONFIG.to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.json is not a configuration of tf_teaforn: "),
        ("[1]", "x.json is not a configuration of tf_teaforn: "),
        ('{"architectures": ["T5"]}', "x.json is not .* of tf_teaforn: it has no format_version"),
        (changed(format_version=2), "x.json has format version 2; this release reads 1"),
        (changed(model={"modle": "a"}), "x.json cannot be used: Unknown setting: modle"),
        (changed(model={"vocab_size": 0}), "x.json cannot be used: --vocab_size=0: write 1"),
        (changed(model=[1]), "x.json cannot be used: "),
        (changed(models={}), "x.json cannot be used: .*models"),
        (CONFIG.to_json().replace('"model": {', '"mdl": {'), "x.json has no 'model'"),
    ],
)
def test_json_that_is_not_ours(text, message):
    with pytest.raises(UserError, match=f"^{message}"):
        RunConfig.from_json(text, origin="x.json")


def test_differences():
    other = dataclasses.replace(CONFIG, task_options={}, data_dir=None).replace({"n": 2})
    assert CONFIG.differences(other) == [
        "--data_dir: /data there, None here",
        "--metric: rouge there, None here",
        "--n: 3 there, 2 here",
    ]
    assert CONFIG.differences(CONFIG.replace({})) == []


_values = {
    field.name: (
        st.sampled_from(field.metadata["choices"])
        if field.metadata["choices"]
        else {
            bool: st.booleans(),
            int: st.integers(2, 100_000),
            float: st.floats(0, 0.999, exclude_min=True),
            str: st.text(st.characters(codec="utf-8")),
        }[field_type(field)]
    )
    for field in settings()
    if field.name != "freeze"
}


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
    values=st.fixed_dictionaries({}, optional=_values),
    task=st.text(st.characters(codec="utf-8")),
    options=st.dictionaries(st.text(), st.text() | st.booleans() | st.integers()),
)
def test_any_configuration_round_trips(values, task, options):
    config = RunConfig(task=task, task_options=options, data_dir=task or None).replace(values)
    assert RunConfig.from_json(config.to_json()) == config
    assert config.differences(config) == []

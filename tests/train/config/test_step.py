"""What a proof makes of each key of a training file: one thing, and never nothing."""

from collections.abc import Iterator
from dataclasses import fields

import pytest
from pydantic import BaseModel

from ringspan.core.errors import ConfigError
from ringspan.core.step_config import StepConfig
from ringspan.train.config.problems import table_of
from ringspan.train.config.step import (
    BATCH,
    BESIDE,
    KEYS,
    MODEL,
    NAMED,
    STEP,
    UPDATE,
    read_step,
)
from ringspan.train.config.tables import TrainConfig
from tests.train.runs import training_file


def keys(table: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, field in table.model_fields.items():
        if inner := table_of(field):
            yield from keys(inner, f"{path}{name}.")
        else:
            yield path + name


def test_each_key_of_a_training_file_is_in_one_class():
    assert {*KEYS} == {*keys(TrainConfig)}
    assert {*KEYS.values()} == {STEP, UPDATE, MODEL, BATCH, NAMED, BESIDE}
    options = {field.name for field in fields(StepConfig)}
    taken = {key.partition(".")[2] for key, how in KEYS.items() if how == STEP}
    assert taken - options == {"ring", "replicate", "tp"}


def test_options_of_a_step_come_from_every_table():
    step = read_step(
        [
            "model.compile=eager",
            "optimizer.z_loss=1e-4",
            "optimizer.label_smoothing=0.1",
            "attention.layout=striped",
            "memory.loss_chunk_tokens=64",
            "mesh.replicate=2",
        ]
    )
    assert step.options == {
        "compile": "eager",
        "z_loss": 1e-4,
        "label_smoothing": 0.1,
        "layout": "striped",
        "loss_chunk_tokens": 64,
    }
    assert step.sizes == {"ring": None, "replicate": 2, "tp": 1}
    assert step.not_tried == ()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("optimizer.name=lion_8bit", 'optimizer.name="lion_8bit"'),
        ("optimizer.batch_size=4", "optimizer.batch_size=4"),
        ("memory.activation_bytes=5", "memory.activation_bytes=5"),
        ("memory.activation_bytes=5", "memory.checkpoint=auto (it depends on sizes)"),
        ("data.messages=messages", 'data.messages="messages"'),
    ],
)
def test_what_is_set_and_not_tried_is_named(setting, said):
    assert said in read_step([setting]).not_tried


def test_an_optimizer_step_is_as_the_training_takes_it(tmp_path):
    set_here = ["optimizer.accumulation_steps=4", "optimizer.clip_grad_norm=0.5"]
    given = {"accumulation_steps": 4, "clip_grad_norm": 0.5}
    assert read_step(set_here).options == given
    assert read_step([]).options == {}
    path = tmp_path / "config.toml"
    path.write_text(training_file(tmp_path))
    found = read_step([str(path), "optimizer.accumulation_steps=3"]).options
    assert found["accumulation_steps"] == 3 and found["clip_grad_norm"] == 1.0


def test_a_file_names_the_length_that_is_not_tried(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(training_file(tmp_path))
    step = read_step([str(path)])
    assert step.is_file
    assert any("sequence_length_tokens" in each for each in step.not_tried)


def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(ConfigError, match=r"adapter\.alpha: there is no adapter"):
        read_step(["adapter.alpha=4"])

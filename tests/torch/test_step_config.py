"""The options of a step are the same, with the same defaults, wherever they are given."""

import inspect
from dataclasses import MISSING, fields

import pytest
import torch

import ringspan as rs
from ringspan.core.step_config import StepConfig
from ringspan.plan.cost.setting import Setting
from ringspan.torch import parallelize as module
from ringspan.train.config.load import parse_config
from ringspan.train.config.model_table import ModelConfig
from ringspan.train.config.tables import AttentionConfig, MemoryConfig, OptimizerConfig

DEFAULTS = {field.name: field.default for field in fields(StepConfig)}
TABLES = (ModelConfig, AttentionConfig, MemoryConfig, OptimizerConfig)


def test_parallelize_has_the_options_and_their_defaults():
    parameters = list(inspect.signature(rs.parallelize).parameters.values())[2:]
    assert {each.name: each.default for each in parameters} == DEFAULTS
    assert all(each.kind is each.KEYWORD_ONLY for each in parameters)
    described = inspect.getdoc(rs.parallelize)
    assert [name for name in DEFAULTS if f"\n    {name}: " not in described] == []


@pytest.mark.parametrize("name", DEFAULTS)
def test_each_option_arrives_under_its_name(monkeypatch, name):
    given = torch.float64 if name == "compute_dtype" else object()
    monkeypatch.setattr(module, "put_on_mesh", lambda model, mesh, config: config)
    config = module.parallelize(None, None, **{name: given})
    expected = {name: "float64" if name == "compute_dtype" else given}
    assert {
        field.name: getattr(config, field.name) for field in fields(config)
    } == DEFAULTS | expected


def test_the_tables_of_a_run_have_the_options_and_their_defaults():
    found = {}
    for table in TABLES:
        for name, field in table.model_fields.items():
            if name in DEFAULTS:
                found[name] = field.default
    # A run chooses layers itself, names its dtype as that of the model, and has a watchdog of its own.
    assert found.pop("layers_per_checkpoint") == "auto"
    assert found == {
        name: default for name, default in DEFAULTS.items() if name in found
    }
    assert set(DEFAULTS) - set(found) == {
        "layers_per_checkpoint",
        "compute_dtype",
        "watchdog",
    }


def test_a_run_hands_every_option_on():
    options = {
        "attention": {
            "layout": "striped",
            "route": "all-gather",
            "comm_dtype": "int8",
            "kernel": "eager",
        },
        "memory": {
            "checkpoint": "full",
            "layers_per_checkpoint": 3,
            "loss_chunk_tokens": 7,
            "loss_chunk_vocabulary": 11,
            "feedforward_chunk_tokens": 13,
            "norm_chunk_tokens": 17,
            "expert_slices": 3,
            "offload": "activations",
        },
        "optimizer": {"z_loss": 0.5, "label_smoothing": 0.25, "index_loss": "sparse"},
    }
    run = {
        "model": {"path": "x", "dtype": "bfloat16"},
        "data": {"paths": ["x"], "sequence_length_tokens": 64},
    }
    config = parse_config(run | options)
    expected = {
        name: value for table in options.values() for name, value in table.items()
    }
    assert config.step_config("full", 3) == StepConfig(
        **expected, compute_dtype="bfloat16"
    )
    run["model"]["compile"] = "aot_eager"  # beside which some of the others are refused
    compiled = parse_config(run).step_config("attention", 1)
    assert compiled.compile == "aot_eager"


def test_a_setting_of_the_planner_is_one():
    assert issubclass(Setting, StepConfig)
    kept = {
        field.name: field.default for field in fields(Setting) if field.name in DEFAULTS
    }
    assert kept == DEFAULTS | {"compute_dtype": "bfloat16"}
    assert [field.name for field in fields(Setting) if field.default is MISSING] == [
        "length"
    ]

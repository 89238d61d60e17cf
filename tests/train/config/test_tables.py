"""The configuration: what a file gives, what an override changes, and that every refusal says what to do."""

import json
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from ringspan.core.errors import ConfigError, RingspanError
from ringspan.train.config.load import load_config, parse_config
from ringspan.train.config.tables import TrainConfig
from ringspan.train.config.template import config_template
from tests.cases import refusals

EXAMPLE = Path(__file__).parents[3] / "examples" / "finetune.toml"

MINIMAL = """
[model]
path = "some/model"
[data]
paths = "corpus"
sequence_length_tokens = 64
"""
SCRATCH = """
[model]
init = "scratch"
tokenizer = "train"
config = { model_type = "llama", vocab_size = 300 }
[data]
paths = ["a.txt", "b"]
sequence_length_tokens = 64
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, *overrides: str, text: str = MINIMAL) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text), overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_minimal_file_takes_the_documented_defaults(tmp_path: Path):
    """The template has each default; these are worked out from others."""
    config = load_config(write(tmp_path, MINIMAL))
    assert (config.run, config.steps, config.model.tokenizer_source) == (
        "runs/finetune",
        100,
        "some/model",
    )
    assert config.data.paths == ("corpus",) and config.optimizer.warmup_steps == 10


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["attention.layout=striped"],
            "memory.folds = 2: layout 'striped' is not split into folds; use zigzag or contig",
        ),
        (
            ["attention.layout=balanced"],
            "memory.folds = 2: layout 'balanced' is not split into folds",
        ),
        (
            ["attention.route=auto"],
            "memory.folds = 2: folds=2 does not go with route 'auto'; use ring or all-gather",
        ),
        (
            ["attention.route=ulysses"],
            "memory.folds = 2: folds=2 does not go with route 'ulysses'",
        ),
        (
            ["model.compile=true"],
            "model.compile = true: folds=2 reads keys and values outside of programs; use folds=1",
        ),
        (
            ["memory.folds=1", "model.compile=eager", "memory.offload=activations"],
            "model.compile = \"eager\": offload='activations' takes what layers keep",
        ),
    ],
)
def test_options_of_a_step_that_exclude_each_other(
    tmp_path: Path, overrides: list[str], says: str
):
    assert says in refusal(tmp_path, "memory.folds=2", *overrides)


@pytest.mark.parametrize(
    ("override", "package"),
    [
        ("optimizer.name=paged_adamw_8bit", "ringspan[qlora]"),
        ("optimizer.state=4bit", "pip install torchao"),
    ],
)
def test_packages_of_an_optimizer_are_asked_for_first(
    tmp_path: Path, monkeypatch, override: str, package: str
):
    """As the file is judged, before text or weights are read."""
    for name in ("bitsandbytes", "torchao"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    config = load_config(write(tmp_path, MINIMAL), [override])
    with pytest.raises(RingspanError, match=re.escape(package)):
        config.require_extras()


def test_the_example_loads_and_fits_four_processes():
    config = load_config(EXAMPLE)
    assert config.resolve_mesh(4) == (1, 4)
    assert (
        config.model.config_values()["max_position_embeddings"]
        >= config.data.sequence_length_tokens
    )


def test_overrides_are_toml_or_else_strings_and_the_last_wins(tmp_path: Path):
    config = load_config(
        write(tmp_path, MINIMAL),
        [
            "steps=5",
            "steps = 25",
            "optimizer.learning_rate=1e-4",
            "optimizer.betas=[0.8, 0.9]",
            "model.dtype=bfloat16",
            "data.paths=notes/a.md",
            "run=2026-01-31",
            "model.tokenizer=x=y",
            "mesh.ring=2",
        ],
    )
    assert config.steps == 25
    assert config.optimizer.learning_rate == 1e-4
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.model.dtype == "bfloat16"
    assert config.data.paths == ("notes/a.md",)
    assert config.run == "2026-01-31"
    assert config.model.tokenizer == "x=y"
    assert config.mesh.ring == 2


def test_the_warm_up_may_take_all_steps(tmp_path: Path):
    assert (
        load_config(write(tmp_path, MINIMAL), ["steps=10"]).optimizer.warmup_steps == 10
    )


@pytest.mark.parametrize(
    ("text", "overrides", "key", "value"),
    [
        (MINIMAL, ["steps=5"], "optimizer.warmup_steps", 5),
        (
            MINIMAL,
            ["steps=5", "optimizer.learning_rate=1.0"],
            "optimizer.warmup_steps",
            5,
        ),
        (MINIMAL, ["memory.activation_bytes=1000"], "memory.checkpoint", "auto"),
        (SCRATCH.replace('init = "scratch"', ""), [], "model.init", "scratch"),
    ],
)
def test_a_default_gives_way_to_a_value_that_is_set(
    tmp_path: Path, text, overrides, key, value
):
    found = load_config(write(tmp_path, text), overrides)
    table, name = key.split(".")
    assert getattr(getattr(found, table), name) == value
    assert parse_config(found.model_dump()) == found  # a run's record is read again


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["steps=5", "optimizer.warmup_steps=10"],
            "optimizer.warmup_steps = 10: is more than steps = 5",
        ),
        (
            ["memory.activation_bytes=9", "memory.checkpoint=full"],
            "memory.activation_bytes go together",
        ),
        (['model.config={model_type="llama"}'], 'only for init = "scratch"'),
        (
            ["model.parameter_dtype=float16"],
            'model.parameter_dtype = "float16": float16 overflows',
        ),
    ],
)
def test_two_values_that_are_set_and_contradict_are_refused(
    tmp_path: Path, overrides, message
):
    assert message in refusal(tmp_path, *overrides)


def test_the_template_has_every_key_with_its_default_and_loads(tmp_path: Path):
    text = config_template("train.toml")
    loaded = load_config(write(tmp_path, text))
    assert loaded.model.path == "Qwen/Qwen3-0.6B"
    assert max(map(len, text.splitlines())) <= 120
    # Each default with its # removed says what was there anyway; examples of what has no default do not.
    lines = [
        line.removeprefix("#") if re.match(r"#\w+ = ", line) else line
        for line in text.splitlines()
    ]
    assert (
        load_config(
            write(
                tmp_path, "\n".join(line for line in lines if "an example" not in line)
            )
        )
        == loaded
    )
    whole = tomllib.loads("\n".join(lines))
    fields = TrainConfig.model_fields
    for name, field in fields.items():
        if isinstance(field.annotation, type) and issubclass(
            field.annotation, BaseModel
        ):
            assert whole[name].keys() == field.annotation.model_fields.keys()
    assert whole.keys() == fields.keys()


def test_an_override_changes_only_its_key_of_the_model_config(tmp_path: Path):
    config = load_config(
        write(tmp_path, SCRATCH), ["model.config.hidden_size=32", 'data.paths=["c"]']
    )
    assert config.model.config_values() == {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 32,
    }
    assert config.data.paths == ("c",)


def test_the_earlier_name_of_a_key_is_read(tmp_path: Path):
    old = "checkpoints.asynchronous=false"
    config = load_config(write(tmp_path, MINIMAL), [old])
    assert not config.checkpoints.async_save
    message = refusal(tmp_path, old, "checkpoints.async_save=true")
    assert "earlier name of checkpoints.async_save" in message


def test_an_override_cannot_smuggle_in_a_second_key(tmp_path: Path):
    config = load_config(write(tmp_path, MINIMAL), ["run=5\nseed = 7"])
    assert (config.run, config.seed) == ("5\nseed = 7", 0)


def test_a_model_config_may_be_a_file(tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"model_type": "llama", "vocab_size": 257}), encoding="utf-8"
    )
    config = load_config(write(tmp_path, SCRATCH), [f"model.config={file}"])
    assert config.model.config_values() == {"model_type": "llama", "vocab_size": 257}


def test_every_key_is_documented():
    def tables(table: type[BaseModel]) -> list[type[BaseModel]]:
        nested = [
            f.annotation
            for f in table.model_fields.values()
            if isinstance(f.annotation, type)
        ]
        return [table] + [
            t for n in nested if issubclass(n, BaseModel) for t in tables(n)
        ]

    found = tables(TrainConfig)
    assert len(found) == 12
    assert [
        f"{t.__name__}.{name}"
        for t in found
        for name, f in t.model_fields.items()
        if not f.description
    ] == []


@refusals("settings")
def test_a_refusal_names_the_key_the_value_and_the_remedy(
    tmp_path: Path, arguments: list[str], message: str
):
    assert message in refusal(tmp_path, *arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            "its weights and its tokenizer; ringspan init writes a file with all tables (and 1 more)",
        ),
        ("steps 5", "run.toml: is not valid TOML"),
        (
            "[model]\n[data]\npaths = 'a'\nsequence_length_tokens = 8",
            'model.path: missing; init = "pretrained" needs',
        ),
        (
            MINIMAL.replace("paths", "path"),
            "data.path: unknown key; did you mean data.paths? (and 1 more)",
        ),
        (
            SCRATCH.replace('tokenizer = "train"', ""),
            "model.tokenizer: missing; give a local folder or a Hub id",
        ),
        (
            SCRATCH.replace("300", "256"),
            "model.config.vocab_size = 256: a trained byte-level tokenizer needs at least 257",
        ),
        (SCRATCH.replace('model_type = "llama",', ""), "has no model_type; add one"),
        (
            SCRATCH.replace('{ model_type = "llama", vocab_size = 300 }', '"no.json"'),
            'model.config = "no.json": cannot be read',
        ),
        (
            MINIMAL + "eval_fraction = 0\n[evaluation]\nevery_steps = 5",
            "evaluation.every_steps = 5: data.eval_fraction = 0",
        ),
    ],
)
def test_a_refused_file_says_why(tmp_path: Path, text: str, message: str):
    assert message in refusal(tmp_path, text=text)


@pytest.mark.parametrize(
    "text",
    [
        "steps =",
        "[model]\n[model]",
        "steps = 1,000",
        "steps = " + 5000 * "9",
        "x = " + 5000 * "[",
    ],
)
def test_what_is_no_toml_comes_with_what_to_write(tmp_path: Path, text: str):
    message = refusal(tmp_path, text=text)
    assert (
        "run.toml: is not valid TOML: " in message
        and "; a line is a [table], one key = value" in message
    )


def test_only_small_files_are_read(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.toml")  # nobody writes to it
    for path in (tmp_path / "pipe.toml", Path("/dev/zero")):
        with pytest.raises(
            ConfigError,
            match=f"{path}: cannot be read .a pipe or a device .* into a file",
        ):
            load_config(path)
        assert "cannot be read (a pipe or a device" in refusal(
            tmp_path, f"model.config={path}", text=SCRATCH
        )
    with (tmp_path / "large.toml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="larger than 16 MiB"):
        load_config(tmp_path / "large.toml")


def test_a_missing_file_and_a_malformed_model_config_are_refused(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"none\.toml: cannot be read \(No such file or directory\)"
    ):
        load_config(tmp_path / "none.toml")
    folder = (
        tmp_path
        / "a folder whose name is long enough that its path would not fit a line if it were cut"
    )
    folder.mkdir()
    (folder / "config.json").write_text("{", encoding="utf-8")
    message = refusal(tmp_path, f"model.config={folder / 'config.json'}", text=SCRATCH)
    assert f'"{folder}/config.json": is not valid JSON' in message


def with_mesh(layout: str = "zigzag", length: int = 64, **mesh: Any) -> TrainConfig:
    return parse_config(
        {
            "model": {"path": "x"},
            "data": {"paths": "a", "sequence_length_tokens": length},
            "mesh": mesh,
            "attention": {"layout": layout},
        }
    )


@pytest.mark.parametrize(
    ("mesh", "world_size", "resolved"),
    [
        ({}, 1, (1, 1)),
        ({}, 6, (1, 6)),
        ({"replicate": 2}, 6, (2, 3)),
        ({"ring": 2, "replicate": 3}, 6, (3, 2)),
        ({"tp": 2, "replicate": 2}, 12, (2, 3)),
    ],
)
def test_the_ring_takes_the_processes_that_replicas_leave(
    mesh: dict[str, int], world_size: int, resolved: tuple[int, int]
):
    assert with_mesh(**mesh).resolve_mesh(world_size) == resolved


@pytest.mark.parametrize(
    ("mesh", "world_size", "message"),
    [
        (
            {"replicate": 4},
            6,
            "mesh.replicate = 4: does not divide the 6 processes; use one of 1, 2, 3, 6",
        ),
        (
            {"ring": 4},
            6,
            "mesh.ring = 4: times mesh.replicate = 1 needs 4 processes, but there are 6; start 4",
        ),
        (
            {"ring": 2, "replicate": 2},
            2,
            "mesh.ring = 2: times mesh.replicate = 2 needs 4 processes, but there are 2",
        ),
        (
            {"tp": 4},
            6,
            "mesh.replicate = 1 times mesh.tp = 4: does not divide the 6 processes",
        ),
        (
            {"ring": 3, "tp": 4},
            6,
            "mesh.ring = 3: times mesh.replicate = 1 times mesh.tp = 4 needs 12 processes",
        ),
    ],
)
def test_a_mesh_that_is_not_the_processes_is_refused(
    mesh: dict[str, int], world_size: int, message: str
):
    with pytest.raises(ConfigError) as caught:
        with_mesh(**mesh).resolve_mesh(world_size)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "shortest"), [("zigzag", 8), ("striped", 4), ("contiguous", 4)]
)
def test_a_sequence_fills_the_ring(layout: str, shortest: int):
    assert with_mesh(layout, shortest).resolve_mesh(4) == (1, 4)
    with pytest.raises(
        ConfigError,
        match=f"a {layout} ring of 4 needs at least {shortest}; lengthen the sequence",
    ):
        with_mesh(layout, shortest - 1).resolve_mesh(4)

"""What a run's folder says of it: a new run, one to go on with, one of another version."""

import json

import pytest

from ringspan.core.errors import ConfigError
from ringspan.train.config.load import parse_config
from ringspan.train.run_folder.record import read_record, recorded


def values(run, **optimizer):
    return {
        "run": str(run),
        "model": {"path": "x"},
        "data": {"paths": "a", "sequence_length_tokens": 64},
        "optimizer": {"warmup_steps": 1, **optimizer},
    }


def begun(run, table="", **others):
    """The folder of a run whose record has these keys beside those of this version."""
    config = parse_config(values(run)).model_dump(mode="json")
    (config[table] if table else config).update(others)
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"run_id": "abc", "config": config}))
    return config


@pytest.mark.parametrize(
    ("table", "key"),
    [("attention", "attention.wire"), ("", "attention_sink"), ("", "old_table")],
)
def test_a_run_of_another_version_continues_without_its_keys(tmp_path, table, key):
    config = begun(
        tmp_path / "run",
        table,
        **{key.split(".")[-1]: {"a": 1} if key == "old_table" else "exact"},
    )
    record = read_record(parse_config(values(tmp_path / "run", learning_rate=1e-5)))
    assert not record.is_new and record.changes == [
        f"{key} is left out: this version of ringspan does not know it",
        "optimizer.learning_rate = 1e-05 (the run began with 0.0003)",
    ]
    assert recorded(config)[0] == parse_config(values(tmp_path / "run"))


@pytest.mark.parametrize("table", ["model", "data"])
def test_another_model_or_text_of_another_version_raises(tmp_path, table):
    begun(tmp_path / "run", table, shuffle=True)
    with pytest.raises(
        ConfigError, match=f"of another version of ringspan, with {table}.shuffle"
    ):
        read_record(parse_config(values(tmp_path / "run")))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"run_id": "abc", "config": 3}',
        '{"run_id": "abc", "config": {}}',
    ],
)
def test_what_is_no_record_is_named(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.json: is not the record of a run"):
        read_record(parse_config(values(tmp_path)))


@pytest.mark.parametrize(
    ("began", "asked", "warmup"),
    [
        ({"steps": 5}, {"steps": 50}, 5),  # its default follows steps, which have grown
        ({"steps": 5, "warmup_steps": 3}, {"steps": 50}, 3),
        ({"steps": 50}, {"steps": 4}, 4),
        ({"steps": 5}, {"steps": 50, "warmup_steps": 10}, 10),
    ],
)
def test_a_warm_up_that_is_not_set_stays_that_of_the_beginning(
    tmp_path, began, asked, warmup
):
    def config(steps, **optimizer):
        return parse_config(values(tmp_path) | {"steps": steps, "optimizer": optimizer})

    record = {"run_id": "abc", "config": config(**began).model_dump(mode="json")}
    (tmp_path / "run.json").write_text(json.dumps(record))
    found = read_record(config(**asked))
    assert found.config.optimizer.warmup_steps == warmup
    assert any("warmup" in line for line in found.changes) == (
        warmup != config(**began).optimizer.warmup_steps
    )


@pytest.mark.parametrize(
    "file", ["config.json", "adapter_config.json", "model.safetensors"]
)
def test_a_models_folder_is_no_runs(tmp_path, file):
    (tmp_path / file).write_text("{}")
    with pytest.raises(
        ConfigError,
        match=rf"is the folder of a model, with {file}; choose a folder of its own",
    ):
        read_record(parse_config(values(tmp_path)))

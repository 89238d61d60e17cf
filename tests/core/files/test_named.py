"""What a path names, if it is no model's folder."""

import pytest

from ringspan.core.files.named import why_no_config


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config.json": '{"model_type": "llama"}'}, None),
        (
            {"notes.txt": ""},
            "has no config.json; give the folder that a model was saved into",
        ),
        (
            {"adapter_config.json": '{"base_model_name_or_path": "its/base"}'},
            "is the folder of an adapter; give that of its base model (its/base)",
        ),
        (
            {"adapter_config.json": "[]"},
            "of its base model (base_model_name_or_path in its adapter_config.json)",
        ),
        (
            {"config.json": "{nope"},
            "config.json is not valid JSON (Expecting property name",
        ),
        (
            {"config.json": '{"type": 1}'},
            "config.json has no model_type of transformers; give the config",
        ),
    ],
)
def test_a_folder_without_a_config_says_what_it_is(tmp_path, files, says):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = why_no_config(tmp_path)
    assert found is None if says is None else says in str(found)

"""Which files are a model's weights: those of transformers' own choice, on folders of empty files."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.modeling_utils import _get_resolved_checkpoint_files

from ringspan.core.errors import ConfigError
from ringspan.core.files.weights import (
    INDEX,
    WEIGHTS,
    files_to_download,
    refuse_beside,
    weights_in,
)

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
OTHERS = [
    "original/consolidated.00.pth",
    "original/params.json",
    "consolidated.safetensors",
    "pytorch_model.bin",
]
IN_FP16 = ["model.fp16-00001-of-00001.safetensors", "model.safetensors.index.fp16.json"]
FOLDERS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "single": ([WEIGHTS, *OTHERS], {}),
    "shards": ([INDEX, *SHARDS, *OTHERS], {}),
    "both": ([WEIGHTS, INDEX, *SHARDS], {}),
    "a stale index": ([WEIGHTS, INDEX], {}),
    "shards of an earlier save": ([WEIGHTS, *SHARDS], {}),
    "in a folder": ([INDEX], {"shards": ["part/1.safetensors"]}),
    "variant": ([WEIGHTS, "model.fp16.safetensors", *IN_FP16], {"variant": "fp16"}),
    "variant in shards": ([WEIGHTS, *IN_FP16], {"variant": "fp16"}),
    "none of the variant": ([WEIGHTS, INDEX, *SHARDS], {"variant": "fp16"}),
    "named by the config": (
        [WEIGHTS, "other.safetensors"],
        {"named": "other.safetensors"},
    ),
    "an index named": (
        [WEIGHTS, "b.safetensors.index.json", *SHARDS],
        {"named": "b.safetensors.index.json"},
    ),
    "a pickle named": ([WEIGHTS], {"named": "pytorch_model.bin"}),
    "consolidated": (["consolidated.safetensors"], {}),
}


def fill(folder: Path, names: list[str], shards: list[str] = SHARDS) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        files = IN_FP16[:1] if "fp16" in name else shards
        facts: Any = {
            "metadata": {},
            "weight_map": {str(number): file for number, file in enumerate(files)},
        }
        (folder / name).write_text(json.dumps(facts if "index" in name else {}))


@pytest.mark.parametrize("case", FOLDERS)
def test_the_files_are_those_that_transformers_opens(tmp_path, case):
    names, options = FOLDERS[case]
    fill(tmp_path, names, options.pop("shards", SHARDS))
    variant, named = options.get("variant"), options.get("named")
    try:
        expected, _ = _get_resolved_checkpoint_files(
            str(tmp_path), variant, None, None, None, False, named
        )
    except (OSError, ValueError):
        expected = None
    try:
        found = [
            str(tmp_path / name)
            for name in weights_in(
                names, lambda name: (tmp_path / name).read_text(), **options
            )
        ]
    except ConfigError:
        found = None
    assert found == expected


def test_no_more_is_downloaded_than_is_opened():
    """Of a repository with all formats that there are; of an adapter, its own file."""
    beside = ["config.json", "generation_config.json", "code/own.py"]
    index = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}})
    texts = {"config.json": "{}", INDEX: index}
    assert files_to_download(
        [*beside, INDEX, *SHARDS, *OTHERS, *IN_FP16[:1]], texts.__getitem__
    ) == [
        *beside,
        INDEX,
        *SHARDS,
    ]
    assert files_to_download([*beside, WEIGHTS, *SHARDS], texts.__getitem__) == [
        *beside,
        WEIGHTS,
    ]
    adapter = ["adapter_config.json", "adapter_model.safetensors"]
    assert (
        files_to_download([*adapter, "adapter_model.bin"], texts.__getitem__) == adapter
    )
    texts["config.json"] = '{"transformers_weights": "x.safetensors"}'
    assert files_to_download(
        [*beside, WEIGHTS, "x.safetensors"], texts.__getitem__
    ) == [*beside, "x.safetensors"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"],
            "only pytorch_model-00001.*, a pickle",
        ),
        (
            ["consolidated.safetensors"],
            "only consolidated.safetensors, which transformers does not open; save it with",
        ),
        (
            IN_FP16,
            "only model.fp16-00001-of-00001.safetensors; give from_pretrained variant='fp16'",
        ),
        (
            [WEIGHTS, "adapter_config.json"],
            "has one next to its weights; load its base model",
        ),
        (
            [WEIGHTS, "shard-00000-model-00001-of-00002.safetensors"],
            "a distributed checkpoint; save the model with",
        ),
    ],
)
def test_what_is_not_opened_is_named_with_a_remedy(names, says):
    with pytest.raises(ConfigError, match=says):
        refuse_beside(names, adapter=False)
        weights_in(names, str)


def test_a_file_outside_of_the_folder_is_refused():
    """What an index names is in ``tests/torch/model/weights/test_folders.py``."""
    with pytest.raises(
        ConfigError,
        match=r"transformers_weights = '\.\./other.safetensors' in config.json is no",
    ):
        weights_in([WEIGHTS], str, named="../other.safetensors")

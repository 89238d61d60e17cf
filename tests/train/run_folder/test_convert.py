"""``ringspan export``: of a checkpoint from any mesh the folder that the run itself writes, with the memory of a piece
of a tensor; what is wrong with a run or a checkpoint is named, and nothing is left behind.
"""

import functools
import json
import shutil
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ringspan.core.errors import CheckpointError, ConfigError
from ringspan.torch.model.weights import writing
from ringspan.train.loop import train
from ringspan.train.run_folder import export
from ringspan.train.run_folder.export import export_checkpoint
from tests.cases import few
from tests.train.runs import settings, train_on

STEPS = 3
MESHES = {
    "ring of 4": {"checkpoints": {"every_steps": 2}},
    "heads over 2, bfloat16": {
        "mesh": {"tp": 2},
        "model": {"dtype": "bfloat16"},
        "optimizer": {"batch_size": 2},
    },
}


@pytest.fixture(scope="module")
def runs(pool, text):
    """The folder of a run, which is trained when it is first asked for."""

    @functools.cache
    def trained(name):
        changes = dict(MESHES[name])
        model = settings(text, name).model.model_dump(exclude_unset=True) | changes.pop(
            "model", {}
        )
        pool.run(train_on, 4, settings(text, name, model=model, **changes))
        return text / name

    return trained


@pytest.fixture
def run(runs, tmp_path):
    shutil.copytree(runs("ring of 4"), tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("name", few(MESHES, 2))
def test_a_checkpoint_of_any_mesh_gives_what_the_run_wrote(runs, tmp_path, name):
    step, num_bytes = export_checkpoint(
        runs(name), None, tmp_path / "exported", max_shard_size="40KB"
    )
    assert step == STEPS
    written = load_file(runs(name) / "model" / "model.safetensors")
    files = sorted(tmp_path.glob("exported/*.safetensors"))
    assert (
        len(files) > 1 and max(path.stat().st_size for path in files) < 40_000 + 4_000
    )
    exported = {key: value for path in files for key, value in load_file(path).items()}
    assert (
        exported.keys() == written.keys()
        and sum(each.nbytes for each in exported.values()) == num_bytes
    )
    for key, value in written.items():
        assert exported[key].dtype == value.dtype and torch.equal(
            exported[key], value
        ), key
    opened, other = (
        AutoModelForCausalLM.from_pretrained(path)
        for path in (tmp_path / "exported", runs(name) / "model")
    )
    assert opened.config.to_diff_dict() == other.config.to_diff_dict()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "exported")) == len(
        AutoTokenizer.from_pretrained(runs(name) / "model")
    )


def train_into_small_files(mesh, config):
    with mock.patch.object(export, "MAX_SHARD_SIZE", "20KB"):
        return train(config)


def test_a_run_writes_a_model_of_several_files(pool, text, tmp_path):
    """As it does where the weights are more than 5 GB."""
    pool.run(train_into_small_files, 4, settings(text, "small files"))
    assert len(list((text / "small files" / "model").glob("model-*.safetensors"))) > 1
    export_checkpoint(text / "small files", None, tmp_path / "exported")
    opened = AutoModelForCausalLM.from_pretrained(
        text / "small files" / "model"
    ).state_dict()
    for key, value in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict().items()
    ):
        assert torch.equal(opened[key], value), key


def test_an_earlier_step_gives_other_weights(runs, tmp_path):
    assert export_checkpoint(runs("ring of 4"), 2, tmp_path / "earlier")[0] == 2
    earlier, last = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "earlier", runs("ring of 4") / "model")
    )
    assert earlier.keys() == last.keys() and not torch.equal(
        *(each["model.norm.weight"] for each in (earlier, last))
    )


def test_no_more_than_a_piece_of_a_tensor_is_in_memory(runs, tmp_path, monkeypatch):
    piece, kept, most = 1 << 10, list[weakref.ref[torch.Tensor]](), 0
    read = export._Saved.read

    def measured(self, region):
        nonlocal most
        made = read(self, region)
        kept.append(weakref.ref(made))
        most = max(most, sum(each().nbytes for each in kept if each() is not None))
        return made

    monkeypatch.setattr(writing, "_PIECE_BYTES", piece)
    monkeypatch.setattr(export._Saved, "read", measured)
    _, num_bytes = export_checkpoint(runs("ring of 4"), None, tmp_path / "exported")
    assert num_bytes > 30 * piece and 0 < most <= piece


def spoil(run: Path, how: str) -> None:
    checkpoint = sorted((run / "checkpoints").glob("step_*"))[-1]
    file = max(
        checkpoint.glob("**/*.safetensors"), key=lambda path: path.stat().st_size
    )
    record = run / "run.json"
    if how == "flipped":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-5])
    elif how == "missing":
        file.unlink()
    elif how == "no run":
        record.unlink()
    elif how == "no record":
        record.write_text('{"config": 7}')
    elif how == "no checkpoint":
        shutil.rmtree(run / "checkpoints")
    elif how == "another model":
        values = json.loads(record.read_text())
        values["config"]["model"]["config"]["mlp_bias"] = True
        record.write_text(json.dumps(values))
    else:
        values = json.loads(record.read_text())
        values["config"]["adapter"]["rank"] = 4
        values["config"]["model"]["init"] = "pretrained"
        values["config"]["model"]["path"] = "somewhere"
        values["config"]["model"]["config"] = values["config"]["model"]["tokenizer"] = (
            None
        )
        record.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("flipped", CheckpointError, "safetensors"),
        ("cut", CheckpointError, "safetensors"),
        ("missing", CheckpointError, "safetensors"),
        ("no run", ConfigError, "is no folder of a run (run.json is missing)"),
        ("no record", ConfigError, "run.json: is not the record of a run"),
        ("no checkpoint", ConfigError, "has no checkpoint"),
        (
            "another model",
            CheckpointError,
            "has no model.layers.0.mlp.gate_proj.bias; is it of another model?",
        ),
        ("adapter", ConfigError, "its checkpoints hold an adapter alone"),
    ],
)
def test_what_is_wrong_with_a_run_is_named(run, tmp_path, how, error, message):
    spoil(run, how)
    with pytest.raises(error) as caught:
        export_checkpoint(run, None, tmp_path / "exported")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_full_disk_leaves_nothing_behind(run, tmp_path, monkeypatch):
    def full(self, name, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.WeightsPlan, "write", full)
    with pytest.raises(
        CheckpointError, match=r"exported was not written: .*No space left on device"
    ):
        export_checkpoint(run, None, tmp_path / "exported")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]

"""Checkpoints written beside a trainer's steps are those that it writes while it waits."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainerState

from ringspan.checkpoints import folder as folders
from ringspan.core.errors import CheckpointError, UnsupportedError
from ringspan.hf import RingConfig, ring_accelerator
from tests.hf.test_hub import OPTIONS as ONLINE
from tests.hf.test_hub import Hub
from tests.hf.trainers import history, plain, saved, sft

OPTIONS = {
    **{"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2},
    **{"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "worst"},
    **{"greater_is_better": True, "load_best_model_at_end": True, "seed": 7},
}  # fmt: skip


class Seen(TrainerCallback):
    """Return the steps whose checkpoints are complete when ``on_save`` comes, in which step of the run."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(state.global_step)
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        at = json.loads((folder / "trainer_state.json").read_text())["global_step"]
        load_file(folder / "model.safetensors")
        assert at == state.global_step


def best_at(step: int) -> Any:
    """A metric that is best after a step, by how often it was asked."""
    asked = iter(range(1, 100))
    return lambda _: {"worst": -abs(next(asked) - step)}


def run_to_the_end(mesh: Any, folder: str, ring: dict[str, Any]) -> Any:
    seen = Seen()
    own = {"callbacks": [seen], "compute_metrics": best_at(1)}
    trainer = plain(mesh, "llama", ring, folder, OPTIONS | own)
    trainer.train()
    return history(trainer), seen.steps, trainer.state.best_model_checkpoint


def test_checkpoints_best_model_and_callbacks_keep_their_meaning(world, tmp_path):
    found = {}
    for name, ring in (("waits", {}), ("beside", {"async_save": True})):
        folder = tmp_path / name
        runs = world(2).run(run_to_the_end, 2, str(folder), ring)
        for _, steps, best in runs:
            assert steps == [1, 2, 3] and best == str(folder / "checkpoint-1")
        found[name] = runs[0][0]
        assert saved(folder) == ["checkpoint-1", "checkpoint-3"]
    assert found["beside"]["loss"] == found["waits"]["loss"]
    for name, weight in found["waits"]["weights"].items():
        assert torch.equal(found["beside"]["weights"][name], weight)
    for step in (1, 3):
        one, other = (tmp_path / name / f"checkpoint-{step}" for name in found)
        assert contents(other) == contents(one)
    best = json.loads((other / "trainer_state.json").read_text())
    assert best["best_model_checkpoint"] == str(tmp_path / "beside" / "checkpoint-1")
    assert not [path for path in other.parent.iterdir() if "ringspan" in path.name]


def first_rank_is_slow(mesh: Any, folder: str) -> list[int]:
    """A run whose first rank takes long to write the trainer's state, which is the last file of a checkpoint."""
    save = TrainerState.save_to_json

    def slow(state: TrainerState, path: str) -> None:
        time.sleep(0.3)
        save(state, path)

    seen = Seen()
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    with mock.patch.object(TrainerState, "save_to_json", slow):
        plain(mesh, "llama", {}, folder, options | {"callbacks": [seen]}).train()
    return seen.steps


def test_on_save_comes_on_all_ranks_when_the_first_has_written(world, tmp_path):
    assert world(2).run(first_rank_is_slow, 2, str(tmp_path)) == [[1, 2]] * 2


def contents(folder: Path) -> dict[str, Any]:
    """A checkpoint's files, and the numbers in those of weights and of the optimizer."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): {
            name: tensor.tolist() for name, tensor in load_file(path).items()
        }
        if path.suffix == ".safetensors"
        else None
        for path in files
    }


def slow_disk(mesh: Any, folder: str) -> Any:
    """Steps that are taken while the first checkpoint waits for a disk, and how the run goes on from it."""
    ring, gate, commit = {"async_save": True}, threading.Event(), folders._commit
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "seed": 7}
    taken: list[int] = []

    def stalled(scratch: Path, target: Path) -> None:
        gate.wait(60)
        commit(scratch, target)

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            taken.append(state.global_step)
            if state.global_step == 3:
                assert saved(Path(folder)) == []

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # All ranks have ended the third step here, so that none looks after another has opened.
            if state.global_step == 3:
                gate.set()

    with mock.patch.object(folders, "_commit", stalled):
        trainer = plain(mesh, "llama", ring, folder, options | {"callbacks": [Steps()]})
        trainer.train()
    weights = history(trainer)
    again = plain(mesh, "llama", ring, folder, options)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return taken, weights, history(again)


def test_steps_go_on_while_a_checkpoint_waits_for_the_disk(world, tmp_path):
    for taken, through, resumed in world(2).run(slow_disk, 2, str(tmp_path)):
        assert taken == [1, 2, 3, 4]
        assert resumed["loss"] == through["loss"]
        for name, weight in through["weights"].items():
            assert torch.equal(resumed["weights"][name], weight)
    assert saved(tmp_path) == ["checkpoint-2", "checkpoint-4"]


def full_disk(mesh: Any, folder: str) -> Any:
    """A run whose second checkpoint cannot be written: what is raised, and what is left."""
    write, made = os.fsync, []

    def fails(descriptor: int) -> None:
        if "ringspan-saving-checkpoint-2" in os.readlink(f"/proc/self/fd/{descriptor}"):
            made.append(descriptor)
            raise OSError(28, "No space left on device")
        write(descriptor)

    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    with mock.patch.object(os, "fsync", fails), pytest.raises(CheckpointError) as seen:
        plain(mesh, "llama", {"async_save": True}, folder, options).train()
    return str(seen.value), bool(made)


def test_a_full_disk_raises_and_leaves_the_last_checkpoint(world, tmp_path):
    told = world(2).run(full_disk, 2, str(tmp_path))
    assert any(failed for _, failed in told)
    for message, _ in told:
        assert "No space left on device" in message and "rank" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1"]
    load_file(tmp_path / "checkpoint-1" / "model.safetensors")


def adapter(mesh: Any, folder: str) -> Any:
    options = {"lora": True, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = sft(mesh, "llama", {"async_save": True}, folder, options)
    trainer.train()
    own = history(trainer)
    again = sft(mesh, "llama", {"async_save": True}, folder, options)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    return own, history(again)


@pytest.mark.long
def test_an_adapter_is_saved_beside_the_steps_of_sft(world, tmp_path):
    for through, resumed in world(2).run(adapter, 2, str(tmp_path)):
        assert resumed["loss"] == through["loss"]
        for name, weight in through["weights"].items():
            assert torch.equal(resumed["weights"][name], weight), name
    assert (tmp_path / "checkpoint-1" / "adapter_model.safetensors").is_file()


def pushed(mesh: Any, folder: str) -> Any:
    """Return what is uploaded of a run, and which of its checkpoints were complete then."""
    hub = Hub(Path(folder, "hub"))
    with (
        mock.patch.object(HfApi, "create_repo", side_effect=hub.create_repo),
        mock.patch.object(HfApi, "upload_folder", side_effect=hub.upload_folder),
    ):
        trainer = sft(mesh, "llama", {"async_save": True}, f"{folder}/mine", ONLINE)
        trainer.train()
    return [(place, text) for _, place, text in hub.sent], history(trainer)["weights"]


@pytest.mark.long
def test_a_checkpoint_is_pushed_when_it_is_complete(world, tmp_path):
    (sent, weights), (others, _) = world(2).run(pushed, 2, str(tmp_path))
    places = [(place, "step" in text) for place, text in sent]
    assert places == [("", True), ("last-checkpoint", True)] * 2 and others == []
    last = load_file(tmp_path / "hub" / "3" / "model.safetensors")
    assert torch.equal(last["lm_head.weight"], weights["lm_head.weight"])


def test_a_loop_of_its_own_refuses_it():
    with pytest.raises(UnsupportedError, match="async_save=True is for trainers"):
        ring_accelerator(RingConfig(async_save=True))

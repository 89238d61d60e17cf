"""What a trainer on a ring uploads: rank 0, once, a folder that opens with the weights of all ranks."""

import shutil
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM, AutoTokenizer

from ringspan.torch.model.saving import whole_weights
from tests.hf.trainers import sft

OPTIONS = {
    **{
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 2,
        "push_to_hub": True,
        "hub_strategy": "checkpoint",
    },
    **{"hub_model_id": "model", "hub_always_push": True},
}
# of each upload: the repository, the folder in it, and what the commit says
Sent = list[tuple[str, str, str]]


class Hub:
    """In the place of the Hugging Face Hub: keeps what it is sent in folders."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.sent: Sent = []

    def create_repo(self, name: str, **_: Any) -> Any:
        return SimpleNamespace(repo_id=f"somebody/{name}")

    def upload_folder(
        self, repo_id: str, folder_path: str, commit_message: str, **options: Any
    ) -> Any:
        ignored = shutil.ignore_patterns(*options.get("ignore_patterns", ()))
        shutil.copytree(folder_path, self.place / str(len(self.sent)), ignore=ignored)
        self.sent.append((repo_id, options.get("path_in_repo", ""), commit_message))
        done: Future[None] = Future()
        done.set_result(None)
        return done if options["run_as_future"] else None


def pushed(mesh: Any, folder: str) -> tuple[Sent, int, dict[str, Any]]:
    """What this rank uploads while it trains and at the end, how often it takes part in saving, and the weights."""
    hub = Hub(Path(folder, "hub"))
    with (
        mock.patch.object(HfApi, "create_repo", side_effect=hub.create_repo),
        mock.patch.object(HfApi, "upload_folder", side_effect=hub.upload_folder),
    ):
        trainer = sft(mesh, "llama", {}, f"{folder}/mine", OPTIONS)
        with mock.patch.object(
            trainer.model, "save_pretrained", wraps=trainer.model.save_pretrained
        ) as save:
            trainer.train()
            trainer.push_to_hub("Done")
    return (
        hub.sent,
        save.call_count,
        {name: weight.clone() for name, weight in whole_weights(trainer.model).items()},
    )


def test_checkpoints_are_pushed_while_a_run_goes_on(world, tmp_path):
    (sent, saves, weights), (others, times, _) = world(2).run(pushed, 2, str(tmp_path))
    steps = [f"Training in progress, step {step}" for step in (1, 2)]
    places = [
        (place, text + also)
        for text in steps
        for place, also in (("", ""), ("last-checkpoint", ", checkpoint"))
    ]
    assert sent == [("somebody/model", *each) for each in [*places, ("", "Done")]]
    assert (others, times) == ([], saves)
    for number in (2, 3, 4):  # of the last step, both, and at the end
        folder = tmp_path / "hub" / str(number)
        opened = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert all(
            torch.equal(opened[name], weight) for name, weight in weights.items()
        )
        assert AutoTokenizer.from_pretrained(folder).eos_token == "w1"
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "hub" / "0").state_dict()
    assert not torch.equal(first["lm_head.weight"], weights["lm_head.weight"])

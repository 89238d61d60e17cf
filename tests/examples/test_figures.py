"""The commands behind the figures of two examples, from training to JSON and picture, in tiny form."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import in_context_rl_memory, retrieval
from ringspan.cli.commands.evaluate import evaluate_ranks
from ringspan.evaluate.settings import EvalSettings
from ringspan.torch.runtime.launch import launch
from tests.examples.imported import imported


def called(folder: str, name: str, options: list[str], **changes: Any) -> None:
    """The script of an example, with such arguments and other module constants."""
    module = imported(folder, name)
    before = {key: getattr(module, key) for key in changes}
    vars(module).update(changes)
    sys.argv = [f"{name}.py", *options]
    module.main()
    vars(module).update(before)


@pytest.mark.long  # starts three processes
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="Linux's limits")
def test_what_fits_the_stated_memory_is_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(in_context_rl_memory, "TRIED", {"grid": ((1, 4), (2, 300))})
    monkeypatch.setattr(in_context_rl_memory, "RESULT", tmp_path / "memory.json")
    in_context_rl_memory.main("grid", 24)
    found = json.loads((tmp_path / "memory.json").read_text())
    fits, does_not = found["worlds"]["grid"]["rows"]
    assert (fits["trained"], fits["tokens"], fits["said"]) == (True, 64, "")
    assert not does_not["trained"]
    assert does_not["said"].startswith(
        "training on 4,800 tokens takes more than 24 MB of each of 2 processes"
    )


def extended(options: list[str]) -> None:
    stages = (imported("retrieval", "train").Stage(13, 13, 3),)
    called("retrieval", "train", ["extend", *options], STAGES=stages)


@pytest.mark.long
def test_the_recipe_is_trained_asked_and_drawn(tmp_path, monkeypatch):
    options = [f"--output={tmp_path}", "--steps=2", "--tokens=150", "--length=300"]
    monkeypatch.setattr(sys, "argv", [])
    called("retrieval", "train", ["short", *options])
    called("retrieval", "train", ["control", *options], CONTROL_STEPS=2)
    launch(extended, 2, options, threads=1)

    names = ("extended", "unextended", "untrained")
    asked = [
        EvalSettings(folder=str(tmp_path / name), task="lines", lengths=(250,), items=2)
        for name in names
    ]
    for name, found in zip(
        names,
        launch(evaluate_ranks, 2, asked, str(tmp_path), threads=1)[0],
        strict=True,
    ):
        (tmp_path / f"lines-{name}.json").write_text(
            json.dumps({**found, "model": name})
        )
    monkeypatch.setattr(retrieval, "RESULT", tmp_path / "retrieval.json")
    monkeypatch.setattr(retrieval, "PICTURE", tmp_path / "retrieval.svg")
    retrieval.main(tmp_path)
    made = json.loads(Path(tmp_path / "retrieval.json").read_text())
    assert [(row["model"], row["length"]) for row in made["rows"]] == [
        (name, 250) for name in (*names, "chance")
    ]
    assert made["rows"][-1]["accuracy"] == 1 / 23
    assert (
        made["training"]["extended"][-1]["step"] == 3
        and made["training"]["short"][-1]["step"] == 2
    )
    assert (tmp_path / "retrieval.svg").read_text().count('class="curve"') == 4

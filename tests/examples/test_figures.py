"""The commands behind the figures of two examples, from training to JSON and picture, in tiny form."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import in_context_rl, in_context_rl_memory, retrieval
from ringspan.cli.commands.evaluate import evaluate_ranks
from ringspan.evaluate.settings import EvalSettings
from ringspan.torch.runtime.launch import launch
from tests.examples.imported import imported

WORLD = ["--world=grid", "--tasks=5", "--collected=4", "--steps=3", "--tokens=100", "--evaluated=4"]


def called(folder: str, name: str, options: list[str], **changes: Any) -> None:
    """The script of an example, with such arguments and other module constants."""
    module = imported(folder, name)
    before = {key: getattr(module, key) for key in changes}
    vars(module).update(changes)
    sys.argv = [f"{name}.py", *options]
    module.main()
    vars(module).update(before)


def compared(options: list[str]) -> None:
    called("in_context_rl", "compare", options)


@pytest.mark.long
def test_agents_are_compared_and_a_run_that_was_ended_continues(tmp_path, monkeypatch):
    result = tmp_path / "grid.json"
    options = [*WORLD, "--trajectories=bc,1,3", f"--output={tmp_path / 'agents'}", f"--result={result}"]
    launch(compared, 2, [*options, "--seeds=1"], threads=1)
    before = json.loads(result.read_text())["rows"]
    launch(compared, 2, [*options, "--seeds=2"], threads=1)
    rows = json.loads(result.read_text())["rows"]
    assert rows[:3] == before and [(row["kind"], row["seed"]) for row in rows] == [
        (kind, seed) for seed in (0, 1) for kind in ("bc", "1", "3")
    ]
    assert {row["ranks"] for row in rows} == {2} and [len(row["returns"]) for row in before] == [1, 1, 3]

    monkeypatch.setattr(in_context_rl, "RESULT", tmp_path / "figures.json")
    monkeypatch.setattr(in_context_rl, "DOCS", tmp_path)
    in_context_rl.main([result])
    made = json.loads((tmp_path / "figures.json").read_text())["worlds"]["grid"]
    assert made["rows"] == rows
    clone, one, three = made["table"]
    assert (clone["kind"], one["kind"], three["kind"]) == ("bc", "1", "3") and three["tokens"] == 3 * 16
    last = [row["returns"][-1] for row in rows if row["kind"] == "3"]
    assert three["last_return"] == pytest.approx(sum(last) / 2, abs=0.006)
    assert three["last_interval"] == pytest.approx(12.706 * abs(last[0] - last[1]) / 2, abs=0.006)
    firsts = [[row["returns"][0] for row in rows if row["kind"] == kind] for kind in ("bc", "1")]
    assert clone["gain"] is None and one["gain"] == pytest.approx(sum(firsts[1]) / 2 - sum(firsts[0]) / 2, abs=0.006)
    assert (tmp_path / "in-context-rl-grid.svg").read_text().count('class="curve"') == 3


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
    assert does_not["said"].startswith("training on 4,800 tokens takes more than 24 MB of each of 2 processes")


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
    asked = [EvalSettings(folder=str(tmp_path / name), task="lines", lengths=(250,), items=2) for name in names]
    for name, found in zip(names, launch(evaluate_ranks, 2, asked, str(tmp_path), threads=1)[0], strict=True):
        (tmp_path / f"lines-{name}.json").write_text(json.dumps({**found, "model": name}))
    monkeypatch.setattr(retrieval, "RESULT", tmp_path / "retrieval.json")
    monkeypatch.setattr(retrieval, "PICTURE", tmp_path / "retrieval.svg")
    retrieval.main(tmp_path)
    made = json.loads(Path(tmp_path / "retrieval.json").read_text())
    assert [(row["model"], row["length"]) for row in made["rows"]] == [(name, 250) for name in (*names, "chance")]
    assert made["rows"][-1]["accuracy"] == 1 / 23
    assert made["training"]["extended"][-1]["step"] == 3 and made["training"]["short"][-1]["step"] == 2
    assert (tmp_path / "retrieval.svg").read_text().count('class="curve"') == 4

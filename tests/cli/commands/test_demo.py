"""The demonstration, in small: every part of it runs, and what it claims is in its result."""

import json
import re
import sys
import time
from typing import Any

import pytest
import torch

from ringspan.cli.commands.train import train_rank
from ringspan.cli.main import main
from ringspan.torch.model.memory.checkpointing import checkpoint_layers
from ringspan.torch.model.view import view_of
from ringspan.torch.runtime.launch import launch
from ringspan.train.config.load import parse_config
from ringspan.train.demo import DemoOptions, told, training_config
from tests.torch.models import build
from tests.train.runs import losses


def test_one_process_says_how_far_a_step_is():
    said: list[str] = []
    model: Any = build("llama")
    checkpoint_layers(view_of(model), "full")
    for layer in model.model.layers:
        next(iter(layer.children())).register_forward_hook(lambda *_: time.sleep(0.03))
    ids = torch.arange(8)[None]
    with told(model, said.append, every_seconds=0.02):
        model(input_ids=ids, labels=ids).loss.backward()
    ways = list(dict.fromkeys(line.split(",")[0].strip() for line in said))
    assert (
        ways[0] == "forward"
        and "backward" in ways
        and all(re.search(r" of 2, \d+ s", line) for line in said)
    )


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_demo_trains_proves_measures_and_reports(monkeypatch, capfd, tmp_path):
    arguments = [
        "--run",
        str(tmp_path / "demo"),
        "--steps",
        "2",
        "--length",
        "256",
        "--json",
    ]
    monkeypatch.setattr(sys, "argv", ["ringspan", "demo", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    printed = capfd.readouterr()
    result = json.loads(printed.out)
    said = [
        line.split("  ", 1)[1]
        for line in printed.err.splitlines()
        if re.match(r"\d\d:\d\d:\d\d  ", line)
    ]
    assert said[0] == "importing PyTorch and transformers"
    assert all(
        f"on a ring of {ring} at" in line
        for ring, line in zip((1, 2, 4), said[1:], strict=True)
    )
    assert result == json.loads((tmp_path / "demo" / "result.json").read_text())
    assert len(result["metrics"]) == 2 and len(result["evaluation"]) == 1
    assert result["proof"]["loss_relative_difference"] < 1e-6
    assert result["proof"]["worst_error"]["ring"] < 1e-5
    held = {row["ring"]: row["activation_bytes"] for row in result["memory"]}
    assert held[1] / 2 == pytest.approx(held[2], rel=0.03) and held[
        1
    ] / 4 == pytest.approx(held[4], rel=0.03)
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "<svg" in page and "one process" in page and "--length 256 --json" in page

    options = DemoOptions(
        run=str(tmp_path / "folds"), ranks=1, steps=2, length=256, layout="zigzag"
    )
    values = training_config(options).model_dump(exclude_none=True) | {
        "memory": {"folds": 4}
    }
    launch(train_rank, 1, parse_config(values))
    found = [losses(tmp_path / name) for name in ("demo", "folds")]
    assert len(found[0]) == 3 and found[1] == pytest.approx(found[0], rel=1e-6)

"""Runs of a tiny model: their training file, what they read, and what they leave."""

import json
import tomllib
from pathlib import Path
from typing import Any, Final

from ringspan.train.config.load import parse_config
from ringspan.train.config.tables import TrainConfig

_FILE: Final = Path(__file__).with_name("run.toml").read_text(encoding="utf-8")


def training_file(folder: Path, name: str = "run", steps: int = 1) -> str:
    """A file that reads the texts of a folder, in which the run is; it ends with the table of the optimizer."""
    text = _FILE.replace("FOLDER/run", f"FOLDER/{name}").replace("\nsteps = 1", f"\nsteps = {steps}")
    return text.replace("FOLDER", str(folder))


def write_text(folder: Path, files: int = 30) -> Path:
    (folder / "text").mkdir()
    for number in range(files):
        words = (f"chapter {number} line {line} says {line * number % 17}\n" for line in range(40))
        (folder / "text" / f"{number}.txt").write_text("".join(words))
    return folder


def settings(folder: Path, name: str, **changes: Any) -> TrainConfig:
    """Three steps, and evaluations of a part of the texts."""
    values = tomllib.loads(training_file(folder, name, steps=3))
    values["data"]["eval_fraction"] = 0.1
    values["optimizer"] |= changes.pop("optimizer", {})
    values["evaluation"] = {"every_steps": 2, "num_sequences": 3}
    return parse_config(values | changes)


def train_on(mesh: Any, config: TrainConfig) -> Any:
    from ringspan.train.loop import train

    return train(config)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    """Of steps and evaluations, in their order."""
    return [line.get("loss", line.get("eval_loss")) for line in metrics(run)]


def curve(run: Path) -> dict[tuple[int, str], float]:
    """Everything measured that does not depend on the clock; each step once."""
    values = [((line["step"], name), value) for line in metrics(run) for name, value in line.items()]
    timeless = [pair for pair in values if pair[0][1] in ("loss", "grad_norm", "lr", "eval_loss")]
    assert len(timeless) == len(dict(timeless))
    return dict(timeless)

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
    text = _FILE.replace("FOLDER/run", f"FOLDER/{name}").replace(
        "\nsteps = 1", f"\nsteps = {steps}"
    )
    return text.replace("FOLDER", str(folder))


def write_text(folder: Path, files: int = 30) -> Path:
    (folder / "text").mkdir()
    for number in range(files):
        words = (
            f"chapter {number} line {line} says {line * number % 17}\n"
            for line in range(40)
        )
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


def plain_steps(config: TrainConfig, model: Any, data: Any) -> list[float]:
    """The losses of the run's steps by torch's AdamW and cross-entropy alone, on one process, of four examples each."""
    import torch

    from ringspan.train.data.sequences import BatchOrder
    from ringspan.train.job import learning_rate

    order, given = BatchOrder(len(data), config.seed, 4, 1, 1), config.optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed, others = (
        [p for p in trained if p.ndim > 1],
        [p for p in trained if p.ndim <= 1],
    )
    groups = [
        {"params": decayed, "weight_decay": given.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], betas=(0.9, 0.95), eps=1e-8
    )
    found: list[float] = []
    for step in range(1, config.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.steps, given)
        batch = data.batch(order.step_indices(step - 1).ravel().tolist())
        targets = batch.pop("shift_labels").flatten().long()
        logits = model(
            **{name: value for name, value in batch.items() if name != "position_ids"}
        ).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, given.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def metrics(run: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


def losses(run: Path) -> list[float]:
    """Of steps and evaluations, in their order."""
    return [line.get("loss", line.get("eval_loss")) for line in metrics(run)]


def curve(run: Path) -> dict[tuple[int, str], float]:
    """Everything measured that does not depend on the clock; each step once."""
    values = [
        ((line["step"], name), value)
        for line in metrics(run)
        for name, value in line.items()
    ]
    timeless = [
        pair
        for pair in values
        if pair[0][1] in ("loss", "grad_norm", "lr", "eval_loss")
    ]
    assert len(timeless) == len(dict(timeless))
    return dict(timeless)

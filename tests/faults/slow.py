"""A rank that is slowed in real jobs with ``watch_speed``: who is named, and after how many steps.

``python -m tests.faults.slow CONFIG FACTOR``: a job of two ranks whose second computes that many times as long.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.job import Job
from tests.faults.rows import Row

WITHIN_STEPS = 20
TOKENS = 3072


def slow_rank(parent: Path, times: int) -> Row:
    """A rank whose hops take a factor longer from the start."""
    row = Row(
        fault="a rank computes 1.5 to 3 times as long",
        promise=f"named within {WITHIN_STEPS} steps; no other rank",
    )
    named_at: dict[str, int | None] = {}
    for number in range(times):
        factor = (1.5, 2.0, 3.0)[number % 3]
        job = _job(parent, f"slow-{number}", steps=40)
        command = ["tests.faults.slow", str(job.config), str(factor)]
        code = job.start(command=command).wait(300)
        lines = named(job.run)
        right = [step for step, line in lines if line.startswith("rank 1 (")]
        named_at[f"{number}: {factor}"] = right[0] if right else None
        row.count(
            code == 0 and len(lines) == 1 and bool(right) and right[0] <= WITHIN_STEPS,
            f"{factor}: {code}, {lines}, {job.tail()[-300:]}",
        )
    row.figures = {"named_after_steps": named_at}
    return row


def quiet(parent: Path, steps: int = 500) -> Row:
    """Nothing is slow but what other processes of the machine slow."""
    row = Row(fault=f"{steps} quiet steps", promise="no rank is named")
    job = _job(parent, "quiet", steps=steps)
    code = job.start().wait(900)
    lines = named(job.run)
    row.count(code == 0 and not lines, f"{code}, {lines}")
    row.figures = {"windows": len(windows(job.run))}
    return row


def windows(run: Path) -> list[dict[str, Any]]:
    """The windows of a run's ``speed.jsonl``."""
    text = (run / "speed.jsonl").read_text()
    return [each for each in map(json.loads, text.splitlines()) if "step" in each]


def named(run: Path) -> list[tuple[int, str]]:
    """The lines that a run has said of slow ranks, with their steps."""
    return [(each["step"], line) for each in windows(run) for line in each["lines"]]


def _job(parent: Path, name: str, steps: int) -> Job:
    """A job of sequences that are long enough for attention to count."""
    job = Job(parent, name, steps=steps, every_steps=0)
    text = job.config.read_text().replace("_embeddings = 64", "_embeddings = 4096")
    text = text.replace("length_tokens = 45", f"length_tokens = {TOKENS}")
    job.config.write_text("watch_speed = true\n" + text)
    return job


def _slowed(config: Any, factor: float) -> Any:
    """Train as ``ringspan train``; hops of the second rank are followed by a sleep."""
    import torch.distributed as dist

    from ringspan.cli.commands.train import train_rank
    from ringspan.torch.engine.attention import ring
    from ringspan.torch.engine.transport.exchange import hop_recorded

    @contextmanager
    def slowed(*args: Any) -> Iterator[None]:
        with hop_recorded(*args):
            started = time.perf_counter()
            yield
            time.sleep((factor - 1) * (time.perf_counter() - started))

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(ring, "hop_recorded", slowed)
        return train_rank(config)


def main(path: str, factor: str) -> None:
    from ringspan.torch.runtime.launch import launch
    from ringspan.train.config.load import load_config

    launch(_slowed, 2, load_config(path), float(factor), threads=1)


if __name__ == "__main__":
    main(*sys.argv[1:])

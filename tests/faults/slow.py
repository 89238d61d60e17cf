"""A rank or a link that is slowed in real jobs with ``watch_speed``: who is named, and after how many steps.

``python -m tests.faults.slow CONFIG FOLDER``: a job of two ranks, of which each computes as many times as long as the
file with its number in the folder says.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.hosts import Hosts
from tests.faults.job import Job
from tests.faults.rows import Row

WITHIN_STEPS = 20
TOKENS = 3072
_SLOW_RATE = "10mbit"


def slow_rank(parent: Path, times: int, seed: int = 0) -> Row:
    """A rank whose hops take a factor longer, then no longer, again and again in one job."""
    row = Row(
        fault="a rank computes 1.5 or 2 times as long",
        promise=f"named within {WITHIN_STEPS} steps; no other rank and no link",
    )
    generator, job = random.Random(seed), _job(parent, "slow-rank", steps=100_000)
    factors = parent / "factors"
    factors.mkdir()
    job.start(command=["tests.faults.slow", str(job.config), str(factors)])
    after = list[int]()
    try:
        for number in range(times):
            rank, factor = generator.randrange(2), (1.5, 2.0)[number % 2]
            after.append(
                _named_after(
                    job,
                    row,
                    f"rank {rank} (",
                    slow=partial((factors / str(rank)).write_text, str(factor)),
                    restore=partial((factors / str(rank)).unlink),
                )
            )
    finally:
        job.end()
    row.figures = {"named_after_steps": after}
    return row


def slow_link(parent: Path, times: int, seed: int = 0) -> Row:
    """What one of three hosts sends is held to a rate, then no longer, again and again in one job."""
    row = Row(
        fault=f"the link of one of three hosts held to {_SLOW_RATE}",
        promise=f"named within {WITHIN_STEPS} steps; no rank and no link of another host",
    )
    generator, job = random.Random(seed), _job(parent, "slow-link", steps=100_000)
    logs = [parent / f"slow-link-{host}.log" for host in range(3)]
    command = ["-m", "ringspan", "train", str(job.config)]
    after = list[int]()
    with Hosts(logs, command, {"HF_DATASETS_CACHE": str(parent / "cache")}) as hosts:
        job.process, job.log = hosts.processes[0], logs[0]
        for _ in range(times):
            host = generator.randrange(3)
            after.append(
                _named_after(
                    job,
                    row,
                    f"the link from rank {host} (",
                    slow=partial(hosts.hold, host, _SLOW_RATE),
                    restore=partial(hosts.release, host),
                )
            )
    row.figures = {"named_after_steps": after, "rate": _SLOW_RATE}
    return row


def _named_after(
    job: Job,
    row: Row,
    expected: str,
    slow: Callable[[], object],
    restore: Callable[[], object],
) -> int:
    """Slow something down until a line is said, restore it until that ends; return the steps until the first."""
    from_step, before = job.last_step(), len(named(job.run))
    job.until(lambda: job.last_step() >= from_step + 8, 300, "progress")
    slow()
    struck = job.last_step()
    job.until(lambda: len(named(job.run)) > before, 600, "line of who is slow")
    step, line = named(job.run)[before]
    took = step - struck
    row.count(
        line.startswith(expected) and took <= WITHIN_STEPS,
        f"{expected} after {took} steps: {line}",
    )
    restore()
    ended = ("no longer than", "as fast as")
    job.until(
        lambda: any(
            end in line for _, line in named(job.run)[before:] for end in ended
        ),
        600,
        "line of its end",
    )
    others = [line for _, line in named(job.run)[before:] if expected not in line]
    if others:
        row.count(False, f"{expected}: {others}")
    return took


def quiet(parent: Path, steps: int = 500) -> Row:
    """Nothing is slow but what other processes of the machine slow."""
    row = Row(fault=f"{steps} quiet steps", promise="no rank and no link is named")
    job = _job(parent, "quiet", steps=steps)
    code = job.start().wait(1800)
    lines = named(job.run)
    row.count(code == 0 and not lines, f"{code}, {lines}")
    row.figures = {"windows": len(windows(job.run))}
    return row


def windows(run: Path) -> list[dict[str, Any]]:
    """The windows of a run's ``speed.jsonl``."""
    path = run / "speed.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [each for each in map(json.loads, lines) if "step" in each]


def named(run: Path) -> list[tuple[int, str]]:
    """The lines that a run has said of slow ranks and links, with their steps."""
    return [(each["step"], line) for each in windows(run) for line in each["lines"]]


def _job(parent: Path, name: str, steps: int) -> Job:
    """A job of sequences that are long enough for attention to count."""
    job = Job(parent, name, steps=steps, every_steps=0)
    text = job.config.read_text().replace("_embeddings = 64", "_embeddings = 4096")
    text = text.replace("length_tokens = 45", f"length_tokens = {TOKENS}")
    job.config.write_text("watch_speed = true\n" + text)
    return job


def _slowed(config: Any, factors: str) -> Any:
    """Train as ``ringspan train``; a slow rank keeps its processor busy after each hop, as that did."""
    import torch.distributed as dist

    from ringspan.cli.commands.train import train_rank
    from ringspan.torch.engine.attention import ring
    from ringspan.torch.engine.transport.exchange import hop_recorded

    path = Path(factors, str(dist.get_rank()))

    @contextmanager
    def slowed(*args: Any) -> Iterator[None]:
        with hop_recorded(*args):
            started = time.thread_time()
            yield
            factor = float(path.read_text() or 1) if path.exists() else 1.0
            ends = started + factor * (time.thread_time() - started)
            while time.thread_time() < ends:
                pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "hop_recorded", slowed)
        return train_rank(config)


def main(path: str, factors: str) -> None:
    from ringspan.torch.runtime.launch import launch
    from ringspan.train.config.load import load_config

    launch(_slowed, 2, load_config(path), factors, threads=1)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A rank that is slowed is named, and noise is not."""

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringspan as rs
from ringspan.torch.engine.attention import ring as ring_loop
from ringspan.torch.engine.transport.exchange import COUNTERS, hop_recorded
from ringspan.torch.model.consistency.speed import (
    FILE,
    WINDOW_STEPS,
    Judge,
    RankTimes,
    SpeedWatch,
)
from tests.torch.models import build, tokens

HOSTS = ["a", "a", "b", "b"]
QUIET = RankTimes(1e-9, 0.4, 0.05, 1.0)


def judged(windows: int, *times: RankTimes) -> list[tuple[int, str]]:
    """The lines of so many windows of the same times, with the step that a window ends with."""
    judge = Judge(HOSTS)
    return [
        (first + WINDOW_STEPS - 1, line)
        for first in range(1, windows * WINDOW_STEPS, WINDOW_STEPS)
        for line in judge.judge(first, times)
    ]


def test_a_slow_rank_is_named_once_within_twenty_steps():
    slow = RankTimes(1.4e-9, 0.56, 0.0, 1.0)
    waiting = RankTimes(1e-9, 0.4, 0.2, 1.0)
    [(step, line)] = judged(8, waiting, waiting, slow, waiting)
    assert step == 15 and line == (
        "rank 2 (b) computes 1.4 times as long as the median since step 1; the others wait up to 0.16 s a step for it"
    )


def test_more_work_is_not_slowness():
    busy = RankTimes(1e-9, 0.8, 0.0, 1.0)
    waiting = RankTimes(1e-9, 0.4, 0.45, 1.0)
    assert judged(8, waiting, busy, waiting, waiting) == []


def test_what_is_fast_again_is_said_and_can_be_slow_again():
    judge = Judge(HOSTS)
    slow = [QUIET, QUIET, RankTimes(2e-9, 0.8, 0.0, 1.0), QUIET]
    lines = list[str]()
    for window in range(12):
        times = slow if window not in (3, 4, 5) else [QUIET] * 4
        lines += judge.judge(1 + 5 * window, times)
    assert ["no longer" in line for line in lines] == [False, True, False]
    assert lines[1].endswith("since step 16")


def test_noise_names_nobody():
    """Some steps take thrice as long on some ranks, which the others wait for."""
    draw, judge = random.Random(0), Judge(HOSTS)
    for window in range(400):
        steps = [
            [
                1 + 0.1 * draw.random() + 2 * (draw.random() < 0.4) * draw.random()
                for _ in HOSTS
            ]
            for _ in range(WINDOW_STEPS)
        ]
        times = list[RankTimes]()
        for rank in range(len(HOSTS)):
            compute = min(step[rank] for step in steps)
            wait = min(max(step) - step[rank] for step in steps)
            times.append(RankTimes(1e-9 * compute, compute, wait, 1.5))
        assert judge.judge(1 + 5 * window, times) == []


def watched(mesh: Any, folder: str) -> Any:
    """Steps of which those from the sixth on compute longer on rank 1, and what is said of them."""
    model: Any = rs.parallelize(build("llama"), mesh)
    lines, seconds = list[str](), 0.0
    ids = tokens(1, 64)
    batch = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)

    @contextmanager
    def slowed(*args: Any) -> Iterator[None]:
        with hop_recorded(*args):
            yield
            time.sleep(seconds)

    watch = SpeedWatch(mesh, Path(folder), lines.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_loop, "hop_recorded", slowed)
        for step in range(1, 26):
            seconds = 0.03 if dist.get_rank() == 1 and step > 5 else 0.0
            model(**batch).loss.backward()
            watch.step(step)
    watch.close()
    return lines, watch.metrics, COUNTERS.hops


def test_a_rank_that_sleeps_in_each_hop_is_named(pool, tmp_path):
    found = pool.run(watched, 3, str(tmp_path))
    for rank, (lines, metrics, records) in enumerate(found):
        assert len(lines) == (rank == 0) and records is None
        assert metrics["slowest_rank"] == 1 and metrics["slowest_rank_ratio"] > 2
    [line] = found[0][0]
    assert line.startswith("rank 1 (") and "times as long as the median since" in line
    entries = [json.loads(each) for each in (tmp_path / FILE).read_text().splitlines()]
    assert len(entries[0]["hosts"]) == 3
    named = [entry["step"] for entry in entries[1:] if entry["lines"]]
    assert named and named[0] <= 25
    assert len(entries[-1]["compute_seconds"]) == len(entries[-1]["wait_seconds"]) == 3
    assert torch.tensor(entries[-1]["compute_seconds"]).argmax() == 1

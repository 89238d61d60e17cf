"""A rank that is slowed is named, and what it waits for does not count as its own slowness."""

import json
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
from ringspan.torch.engine.transport.clock import seconds
from ringspan.torch.engine.transport.exchange import (
    COUNTERS,
    HopRecord,
    Transfer,
    TransferRecord,
    hop_recorded,
    recorded,
)
from ringspan.torch.model.consistency.speed import FILE, SpeedWatch, rank_times
from tests.torch.models import build, tokens


def test_what_a_hop_waits_for_is_not_what_it_computes():
    """In backward a hop waits for a gradient, as long as its link takes."""
    device = torch.device("cpu")
    wait = TransferRecord(0, True, 8, 8, device, posted=1.0, waited=1.2, arrived=2.2)
    wait.thread_seconds = 0.1
    hops = [
        HopRecord(0, 100, 1.0, 2.5, waits=[wait], thread_seconds=0.5),
        HopRecord(1, 300, 2.5, 2.6, thread_seconds=0.2),
    ]
    times = rank_times(3.0, [wait], hops)
    assert times.compute_seconds == pytest.approx(0.6)
    assert times.pair_seconds == pytest.approx(0.4 / 100)
    assert times.wait_seconds == pytest.approx(1.0) and times.step_seconds == 3.0


class _Late:
    """A process group's work that arrives after a while."""

    def wait(self) -> None:
        time.sleep(0.05)


def test_a_wait_within_a_hop_is_noted_with_its_sender():
    device = torch.device("cpu")
    with recorded() as (_, hops):
        record = TransferRecord(0, True, 8, 8, device, posted=time.perf_counter())
        late: Any = _Late()
        transfer = Transfer([late, late], [], record, senders=[3])
        with hop_recorded(0, 100, device):
            transfer.wait()
    assert hops[0].waits == [record]
    [(sender, arrived)] = record.arrivals
    assert sender == 3 and record.waited is not None and record.arrived is not None
    assert seconds(record.waited, arrived) >= 0.05
    assert seconds(arrived, record.arrived) >= 0.05
    assert rank_times(1.0, [record], hops).compute_seconds < 0.04


def watched(mesh: Any, folder: str) -> Any:
    """Steps of which those from the sixth on compute longer on rank 1, and what is said of them."""
    model: Any = rs.parallelize(build("llama"), mesh)
    lines, longer = list[str](), 0.0
    ids = tokens(1, 64)
    batch = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)

    @contextmanager
    def slowed(*args: Any) -> Iterator[None]:
        with hop_recorded(*args):
            yield
            # Sleeping takes no processor time, like a process that others keep off its cores.
            ends = time.thread_time() + longer
            while time.thread_time() < ends:
                pass

    watch = SpeedWatch(mesh, Path(folder), lines.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_loop, "hop_recorded", slowed)
        for step in range(1, 26):
            longer = 0.03 if dist.get_rank() == 1 and step > 5 else 0.0
            model(**batch).loss.backward()
            watch.step(step)
    watch.close()
    return lines, watch.metrics, COUNTERS.hops


@pytest.mark.long
def test_a_rank_that_computes_longer_in_each_hop_is_named(pool, tmp_path):
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
    # A ring's links, each from a rank to the next.
    links = {tuple(link) for *link, _ in entries[-1]["links"]}
    assert {(0, 1), (1, 2), (2, 0)} <= links or {(1, 0), (2, 1), (0, 2)} <= links

"""A slow rank or link, named during a run: hops and waits of every step, compared after a few.

The ring's loop notes what a step computes and waits for. What a hop computes is processor time on CPUs, so that other
processes of the host do not count, and the time between events on GPUs, which are read later without a
synchronization. After each window of steps the ranks of a ring gather when each message was posted, and all ranks what
each has measured.
"""

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.files.lines import Lines
from ringspan.torch.engine.transport.clock import Moment, seconds
from ringspan.torch.engine.transport.collectives import gather, gather_over
from ringspan.torch.engine.transport.exchange import (
    COUNTERS,
    HopRecord,
    TransferRecord,
    begin_records,
    end_records,
)
from ringspan.torch.model.consistency.link_waits import (
    ClockBounds,
    Messages,
    machine,
    messages_of,
    waits_by_sender,
)
from ringspan.torch.model.consistency.slowness import (
    WINDOW_STEPS,
    Judge,
    Link,
    RankTimes,
    typical_pair,
)

FILE: Final = "speed.jsonl"
# Gathers at the start that compare clocks; the shortest bounds them best.
_CLOCK_ROUNDS: Final = 8


@dataclass(frozen=True)
class _Step:
    """Figures and messages of a step on this rank."""

    times: RankTimes
    messages: Messages


class SpeedWatch:
    """Times of this rank's steps, and all ranks' after each window. All ranks of the mesh make each call.

    ``say`` gets a line when a rank or link is named, on the mesh's first rank, which also appends each window to a
    file in ``folder``.
    """

    def __init__(
        self, mesh: DeviceMesh, folder: Path, say: Callable[[str], None]
    ) -> None:
        """Tell all ranks the names of hosts, and compare clocks; collective."""
        self._mesh, self._say = mesh, say
        hosts = dict(gather_over(mesh, (dist.get_rank(), socket.gethostname())))
        self._place = sorted(hosts)
        names = [hosts[rank] for rank in self._place]
        self._is_first = dist.get_rank() == self._place[0]
        self._judge = Judge(names)
        self._lines: Lines | None = None
        if self._is_first:
            folder.mkdir(parents=True, exist_ok=True)
            self._lines = Lines(folder / FILE)
            self._write({"hosts": names})
        self._ring = mesh.get_group("ring")
        self._clocks = ClockBounds()
        self._last_gather: tuple[float, float] | None = None
        self._compare_clocks()
        self._pending: list[
            tuple[int, float, list[TransferRecord], list[HopRecord]]
        ] = []
        self._steps: dict[int, _Step] = {}
        self._began = time.perf_counter()
        self._has_begun = False
        # The latest window, for a trainer's own metrics.
        self.metrics: dict[str, float] = {}
        self._start_records()

    def step(self, step: int) -> dict[str, float] | None:
        """Take the times of a step that has ended; after each window compare all ranks, and return figures."""
        now = time.perf_counter()
        # The first step includes what only a first one does, and a profiler takes the records of its own steps.
        is_ours = COUNTERS.hops is self._hops
        if self._has_begun and is_ours and self._hops:
            taken = now - self._began
            self._pending.append((step, taken, self._transfers, self._hops))
        self._read_finished()
        compared = self._compare(step) if step % WINDOW_STEPS == 0 else None
        self._start_records()
        self._began, self._has_begun = time.perf_counter(), True
        return compared

    def close(self) -> None:
        """Stop noting times."""
        end_records()
        if self._lines is not None:
            self._lines.close()

    def _start_records(self) -> None:
        self._transfers, self._hops = begin_records()

    def _read_finished(self) -> None:
        """Add up the times of steps whose work the device has finished."""
        while self._pending and _are_finished(*self._pending[0][2:]):
            step, taken, transfers, hops = self._pending.pop(0)
            times = rank_times(taken, transfers, hops)
            self._steps[step] = _Step(times, messages_of(transfers, self._on_host))

    def _compare(self, step: int) -> dict[str, float] | None:
        """Gather every rank's least times over the mesh, and judge them."""
        mine, self._steps = self._steps, {}
        waits = self._link_waits(mine)
        figures = least_times([each.times for each in mine.values()])
        gathered = gather_over(self._mesh, (dist.get_rank(), figures, waits))
        gathered.sort(key=lambda each: each[0])
        # A device that is far behind, or a run that begins, has no times yet.
        if any(times is None for _, times, _ in gathered):
            return None
        times = [times for _, times, _ in gathered]
        links: dict[Link, float] = {
            (self._place.index(sender), receiver): wait
            for receiver, (*_, each) in enumerate(gathered)
            for sender, wait in each.items()
        }
        lines = self._judge.judge(step - WINDOW_STEPS + 1, times, links)
        self.metrics = _metrics(times, links)
        if not self._is_first:
            return self.metrics
        self._write(
            {
                "step": step,
                "step_seconds": max(each.step_seconds for each in times),
                "compute_seconds": [round(each.compute_seconds, 6) for each in times],
                "wait_seconds": [round(each.wait_seconds, 6) for each in times],
                "links": [[*link, round(wait, 6)] for link, wait in links.items()],
                "lines": lines,
            }
        )
        for line in lines:
            self._say(line)
        return self.metrics

    def _link_waits(self, steps: Mapping[int, _Step]) -> dict[int, float]:
        """Return the least seconds that a step waited for each sender's messages under way, by sender; collective."""
        here = self._ring.rank()
        posted = {step: each.messages.posted for step, each in steps.items()}
        everyone = self._gathered_with_clocks(posted)
        ahead = [
            0.0 if shares else self._clocks.least_ahead(rank)
            for rank, shares in enumerate(self._share_clock)
        ]
        least = dict[int, float]()
        for step, each in steps.items():
            if not all(step in theirs for theirs in everyone):
                continue
            theirs = [posted[step] for posted in everyone]
            waits = waits_by_sender(here, each.messages.awaited, theirs, ahead)
            for sender, wait in waits.items():
                least[sender] = min(wait, least.get(sender, wait))
        return {
            dist.get_global_rank(self._ring, sender): wait
            for sender, wait in least.items()
        }

    def _compare_clocks(self) -> None:
        machines = gather(machine(), self._ring)
        self._share_clock = [each == machines[self._ring.rank()] for each in machines]
        # The first gather has no moments yet to tell of.
        rounds = 1 if len(set(machines)) == 1 else 1 + _CLOCK_ROUNDS
        for _ in range(rounds):
            self._gathered_with_clocks(None)

    def _gathered_with_clocks(self, thing: object) -> list[Any]:
        """Gather an object over the ring, and with it when each rank entered and left the gather before."""
        entered = time.perf_counter()
        gathered = gather((thing, self._last_gather), self._ring)
        if self._last_gather is not None:
            theirs = {rank: moments for rank, (_, moments) in enumerate(gathered)}
            self._clocks.narrow(self._last_gather, theirs)
        self._last_gather = entered, time.perf_counter()
        self._anchor = self._anchored()
        return [each for each, _ in gathered]

    def _anchored(self) -> tuple[Moment, float]:
        """Return a moment on the device's clock, and the same on the host's."""
        if self._mesh.device_type != "cuda":
            return 0.0, 0.0
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        return event, time.perf_counter()

    def _on_host(self, moment: Moment) -> float:
        at_anchor, on_host = self._anchor
        return on_host + seconds(at_anchor, moment)

    def _write(self, entry: dict[str, Any]) -> None:
        assert self._lines is not None, "on the first rank"
        notice = self._lines.add(json.dumps(entry))
        if notice is not None:
            self._say(notice)


def rank_times(
    step_seconds: float, transfers: Sequence[TransferRecord], hops: Sequence[HopRecord]
) -> RankTimes:
    """Return a step's figures on this rank, once its device has finished it."""
    done = [each for each in hops if each.ended is not None]
    # Every pass begins with the rank's own block.
    own = [each for each in done if each.owner == done[0].owner]
    pairs = sum(each.num_pairs for each in own)
    return RankTimes(
        sum(map(_computing, own)) / max(1, pairs),
        sum(map(_computing, done)),
        sum(map(_waiting, transfers)),
        step_seconds,
    )


def least_times(steps: Sequence[RankTimes]) -> RankTimes | None:
    """Return the least of each figure over some steps; None if there are none."""
    if not steps:
        return None
    return RankTimes(
        min(each.pair_seconds for each in steps),
        min(each.compute_seconds for each in steps),
        min(each.wait_seconds for each in steps),
        min(each.step_seconds for each in steps),
    )


def _computing(hop: HopRecord) -> float:
    """Return what a hop computed without what it waited for: this thread's processor time, or a device's time."""
    if isinstance(hop.started, torch.cuda.Event):
        assert hop.ended is not None, "the hop has ended"
        return seconds(hop.started, hop.ended) - sum(map(_waiting, hop.waits))
    return hop.thread_seconds - sum(each.thread_seconds for each in hop.waits)


def _waiting(transfer: TransferRecord) -> float:
    if transfer.waited is None or transfer.arrived is None:
        return 0.0
    return seconds(transfer.waited, transfer.arrived)


def _metrics(
    times: Sequence[RankTimes], links: Mapping[Link, float]
) -> dict[str, float]:
    typical = typical_pair(times)
    slowest = max(range(len(times)), key=lambda rank: times[rank].pair_seconds)
    ratio = times[slowest].pair_seconds / typical if typical > 0 else 1.0
    return {
        "slowest_rank": slowest,
        "slowest_rank_ratio": ratio,
        "longest_wait_seconds": max(each.wait_seconds for each in times),
        "longest_link_wait_seconds": max(links.values(), default=0.0),
    }


def _are_finished(
    transfers: Sequence[TransferRecord], hops: Sequence[HopRecord]
) -> bool:
    moments = [each.arrived for each in transfers[-1:]]
    moments += [each.ended for each in hops[-1:]]
    return all(map(_is_finished, moments))


def _is_finished(moment: Moment | None) -> bool:
    return not isinstance(moment, torch.cuda.Event) or moment.query()

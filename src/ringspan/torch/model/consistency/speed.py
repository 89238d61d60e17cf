"""A slow rank, named during a run: hops and waits of every step, compared after a few.

The ring's loop notes what a step computes and waits for: as times of the host on CPUs, as events on GPUs, which are
read later without a synchronization. After each window of steps one small sum tells all ranks the figures of each. The
least time of a window counts, and only who is slow in several windows in a row is named: other processes lengthen some
steps, but hardly every one.
"""

import json
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringspan.torch.engine.transport.clock import Moment, seconds
from ringspan.torch.engine.transport.collectives import gather_over
from ringspan.torch.engine.transport.exchange import (
    COUNTERS,
    HopRecord,
    TransferRecord,
    begin_records,
    end_records,
)

FILE: Final = "speed.jsonl"
WINDOW_STEPS: Final = 5
_WINDOWS: Final = 3  # in a row, before someone is named
_SLOWER: Final = 1.25
# Share of a step's time below which slowness is not worth a line.
_LEAST_COMPUTE: Final = 0.03


@dataclass(frozen=True)
class RankTimes:
    """Least seconds of a window's steps on one rank: of a (query, key) pair, of computing and waiting in hops."""

    pair_seconds: float
    compute_seconds: float
    wait_seconds: float
    step_seconds: float


@dataclass
class _Suspicion:
    """A rank that may be slow: its slow windows in a row, and, once it is named, those in which it was not."""

    since: int
    windows: int = 0
    is_named: bool = False
    windows_without: int = 0


@dataclass
class Judge:
    """Judge of who is slow, from the times of all ranks, window after window; the same on every rank.

    ``hosts`` are by rank.
    """

    hosts: Sequence[str]
    _ranks: dict[int, _Suspicion] = field(default_factory=dict)

    def judge(self, first_step: int, times: Sequence[RankTimes]) -> list[str]:
        """Take in a window that began with a step; return a line for each rank that is slow from now on."""
        return self._settle(_slow_ranks(times), first_step)

    def _settle(
        self, found: dict[int, tuple[float, float]], first_step: int
    ) -> list[str]:
        """Count windows of those that were found and of those that are no longer; return what is worth a line."""
        known, lines = self._ranks, list[str]()
        for rank, figures in found.items():
            each = known.setdefault(rank, _Suspicion(first_step))
            each.windows, each.windows_without = each.windows + 1, 0
            if each.windows >= _WINDOWS and not each.is_named:
                each.is_named = True
                lines.append(self._line(rank, each.since, figures))
        for rank in [rank for rank in known if rank not in found]:
            each = known[rank]
            each.windows_without += 1
            if not each.is_named:
                del known[rank]
            elif each.windows_without >= _WINDOWS:
                del known[rank]
                since = first_step - (_WINDOWS - 1) * WINDOW_STEPS
                lines.append(self._line(rank, since, None))
        return lines

    def _line(self, rank: int, since: int, figures: tuple[float, float] | None) -> str:
        name = f"rank {rank} ({self.hosts[rank]})"
        if figures is None:
            return f"{name} computes no longer than the others since step {since}"
        ratio, lost = figures
        return (
            f"{name} computes {ratio:.1f} times as long as the median since step {since}; the others wait up to "
            f"{lost:.2g} s a step for it"
        )


def _typical_pair(times: Sequence[RankTimes]) -> float:
    """Return the median rank's seconds of a pair."""
    return statistics.median_low([each.pair_seconds for each in times])


def _slow_ranks(times: Sequence[RankTimes]) -> dict[int, tuple[float, float]]:
    """Return, by rank, how many times as long it computes as the median, and how many seconds of a step that costs."""
    typical = _typical_pair(times)
    found: dict[int, tuple[float, float]] = {}
    for rank, each in enumerate(times):
        if typical <= 0 or each.pair_seconds < _SLOWER * typical:
            continue
        ratio = each.pair_seconds / typical
        lost = each.compute_seconds * (1 - 1 / ratio)
        if lost >= _LEAST_COMPUTE * each.step_seconds:
            found[rank] = ratio, lost
    return found


class SpeedWatch:
    """Times of this rank's steps, and all ranks' after each window. All ranks of the mesh make each call.

    ``say`` gets a line when a rank is named, on the mesh's first rank, which also appends each window to a
    file in ``folder``.
    """

    def __init__(
        self, mesh: DeviceMesh, folder: Path, say: Callable[[str], None]
    ) -> None:
        """Tell all ranks the names of hosts; collective."""
        self._mesh, self._say = mesh, say
        self._place, hosts = _ranks_of(mesh), gather_over(mesh, _host())
        self._is_first = dist.get_rank() == int(mesh.mesh.min())
        by_rank = dict(zip(gather_over(mesh, dist.get_rank()), hosts, strict=True))
        names = [by_rank[rank] for rank in self._place]
        self._judge = Judge(names)
        self._file = folder / FILE
        if self._is_first:
            folder.mkdir(parents=True, exist_ok=True)
            self._write({"hosts": names})
        self._pending: list[tuple[float, list[TransferRecord], list[HopRecord]]] = []
        self._steps: list[RankTimes] = []
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
            self._pending.append((now - self._began, self._transfers, self._hops))
        self._start_records()
        self._began, self._has_begun = now, True
        self._read_finished()
        return self._compare(step) if step % WINDOW_STEPS == 0 else None

    def close(self) -> None:
        """Stop noting times."""
        end_records()

    def _start_records(self) -> None:
        self._transfers, self._hops = begin_records()

    def _read_finished(self) -> None:
        """Add up the times of steps whose work the device has finished."""
        while self._pending and _are_finished(*self._pending[0][1:]):
            step_seconds, transfers, hops = self._pending.pop(0)
            wait = sum(
                seconds(each.waited, each.arrived)
                for each in transfers
                if each.waited is not None and each.arrived is not None
            )
            done = [(h.started, h.ended, h.num_pairs) for h in hops if h.ended]
            compute = sum(seconds(started, ended) for started, ended, _ in done)
            pairs = sum(num_pairs for *_, num_pairs in done)
            self._steps.append(
                RankTimes(compute / max(1, pairs), compute, wait, step_seconds)
            )

    def _compare(self, step: int) -> dict[str, float] | None:
        """Sum every rank's least times over the mesh, and judge them."""
        mine, self._steps = self._steps, []
        values = [0.0] * 5
        if mine:
            least = [
                min(each.pair_seconds for each in mine),
                min(each.compute_seconds for each in mine),
                min(each.wait_seconds for each in mine),
                min(each.step_seconds for each in mine),
            ]
            values = [1.0, *least]
        everyone = self._summed(values)
        # A device that is far behind, or a run that begins, has no times yet.
        if not all(counted for counted, *_ in everyone):
            return None
        times = [RankTimes(*figures) for _, *figures in everyone]
        lines = self._judge.judge(step - WINDOW_STEPS + 1, times)
        self.metrics = _metrics(times)
        if not self._is_first:
            return self.metrics
        self._write(
            {
                "step": step,
                "step_seconds": max(each.step_seconds for each in times),
                "compute_seconds": [round(each.compute_seconds, 6) for each in times],
                "wait_seconds": [round(each.wait_seconds, 6) for each in times],
                "lines": lines,
            }
        )
        for line in lines:
            self._say(line)
        return self.metrics

    def _summed(self, values: list[float]) -> list[list[float]]:
        """Return every rank's values, by rank: each adds its own to zeros, axis by axis."""
        table = torch.zeros(len(self._place), len(values), dtype=torch.float64)
        table[self._place.index(dist.get_rank())] = torch.tensor(
            values, dtype=torch.float64
        )
        total = table.to(self._mesh.device_type)
        for axis in self._mesh.mesh_dim_names or ():
            if (group := self._mesh.get_group(axis)).size() > 1:
                dist.all_reduce(total, group=group)
        return total.tolist()

    def _write(self, entry: dict[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _metrics(times: Sequence[RankTimes]) -> dict[str, float]:
    typical = _typical_pair(times)
    slowest = max(range(len(times)), key=lambda rank: times[rank].pair_seconds)
    ratio = times[slowest].pair_seconds / typical if typical > 0 else 1.0
    return {
        "slowest_rank": slowest,
        "slowest_rank_ratio": ratio,
        "longest_wait_seconds": max(each.wait_seconds for each in times),
    }


def _are_finished(
    transfers: Sequence[TransferRecord], hops: Sequence[HopRecord]
) -> bool:
    moments = [each.arrived for each in transfers[-1:]]
    moments += [each.ended for each in hops[-1:]]
    return all(map(_is_finished, moments))


def _is_finished(moment: Moment | None) -> bool:
    return not isinstance(moment, torch.cuda.Event) or moment.query()


def _ranks_of(mesh: DeviceMesh) -> list[int]:
    return sorted(int(rank) for rank in mesh.mesh.flatten())


def _host() -> str:
    return socket.gethostname()

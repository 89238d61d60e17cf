"""Host microseconds of the ring loop, with a kernel that computes nothing and no other ranks.

    OMP_NUM_THREADS=1 python -m benchmarks.host [VERSION]

A pass over one rank's own block is the entry, a hop and a launch. Further ranks, whose blocks are not needed, add hops
without work; further documents add launches. Each figure is the least of many repeats. To compare with an older
version, run it again with that one's ``PYTHONPATH`` and a name for it: its rows are added to the file.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor

import ringspan as rs
from ringspan.core.geometry.layout import Layout
from ringspan.core.schedule.kernel_launches import KernelLaunches, bands
from ringspan.core.schedule.schedule import make_schedule
from ringspan.measure.machine import describe_machine
from ringspan.torch.engine import kernels
from ringspan.torch.engine.attention import ring
from ringspan.torch.engine.attention.spec import AttentionSpec
from ringspan.torch.engine.kernels.contract import Memory, Scores
from ringspan.torch.engine.transport.protocol import FakeTransport, Nobody

RESULT: Final = Path(__file__).parent / "results" / "host-cpu.json"
REPEATS: Final = 300
TOKENS: Final = 512
MANY: Final = 33


class Nothing:
    """A kernel that takes a call for each tile and adds nothing."""

    name = "triton"
    memory = Memory()
    adds_in_place = True

    def why_not(self, q: Tensor, v: Tensor, scores: Scores) -> str | None:
        return None

    def launches(self, tiles: Any) -> KernelLaunches:
        return bands(tiles)

    def forward_into(self, *_: Any) -> None: ...

    def backward_into(self, *_: Any) -> None: ...


def least(function: Callable[[], Any]) -> float:
    """Return the least microseconds of a call."""
    times = []
    for _ in range(REPEATS):
        began = perf_counter()
        function()
        times.append(perf_counter() - began)
    return 1e6 * min(times)


def passes(ranks: int, documents: int) -> dict[str, float]:
    """Return the microseconds of both passes of rank 0, each rank of which has documents of its own."""
    length = ranks * TOKENS
    mask = rs.documents([TOKENS // documents] * (documents * ranks))
    schedule = make_schedule(Layout("contiguous", length, ranks), mask, 0)
    q, k, v = (torch.randn(1, 2, TOKENS, 8) for _ in range(3))
    spec = AttentionSpec(scale=1.0, mask=mask.spec, kernel="triton")
    one = ring.Ring(schedule, FakeTransport(Nobody()), Scores(1.0), spec)
    with torch.no_grad():
        out, lse = ring.forward(one, q, k, v)
        return {
            "forward": least(lambda: ring.forward(one, q, k, v)),
            "backward": least(lambda: ring.backward(one, q, q, k, v, out, lse)),
        }


def row() -> dict[str, Any]:
    """Microseconds of a launch and of a hop without work, and of the rest of a pass."""
    with kernels.registered(Nothing()):  # pyright: ignore[reportArgumentType]
        least_of, launches, hops = passes(1, 1), passes(1, MANY - 1), passes(MANY, 1)
    found = {}
    for kind, once in least_of.items():
        launch, hop = (
            (launches[kind] - once) / (MANY - 2),
            (hops[kind] - once) / (MANY - 1),
        )
        found[kind] = {
            "entry": once - launch,
            "launch": launch,
            "hop without work": hop,
        }
    return {
        kind: {name: round(number, 1) for name, number in each.items()}
        for kind, each in found.items()
    }


if __name__ == "__main__":
    rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else {}
    rows[sys.argv[1] if len(sys.argv) > 1 else "this version"] = row()
    facts = {
        "command": "OMP_NUM_THREADS=1 python -m benchmarks.host",
        "machine": describe_machine(),
    }
    RESULT.write_text(
        json.dumps(facts | {"unit": "microseconds", "rows": rows}, indent=2) + "\n"
    )
    print(json.dumps(rows, indent=2))

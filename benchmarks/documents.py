"""Packed documents on ranks: balanced against zigzag, one process on the same documents, and four ranks on slow links.

    python -m benchmarks.documents

65,536 tokens of 200 documents, forward and backward, in turns. Two ranks of one thread compute them as one packed
sequence; one process of two threads computes them one after the other with PyTorch's attention, which asks the kernel
for tiles as short as the ring's. Then four ranks of one thread, each in a network namespace of its own (Linux, root,
iproute2, util-linux), send at a limited rate.
"""

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import ringspan as rs
from benchmarks import namespaces
from benchmarks.namespaces import LINK, ask, bridged, path, run, serve
from benchmarks.turns import timed_in_turns
from ringspan.core.geometry.balanced import batch_layout
from ringspan.core.names import BatchLayoutName
from ringspan.core.schedule.schedule import make_schedule
from ringspan.measure.machine import describe_machine, timed
from ringspan.torch.runtime.launch import launch

RESULT: Final = Path(__file__).parent / "results" / "documents-cpu.json"
LENGTH: Final = 65_536
DOCUMENTS: Final = 200
HEADS: Final = 8
HEAD_DIM: Final = 64
LAYOUTS: Final[tuple[BatchLayoutName, ...]] = ("balanced", "zigzag")
RANKS: Final = 4
GIGABITS: Final = (0.5, 2.0)


def documents() -> list[int]:
    """200 lognormal lengths that add up to 65,536."""
    lengths = np.random.default_rng(0).lognormal(0, 1, DOCUMENTS)
    edges = np.round(
        np.concatenate(([0], lengths.cumsum())) / lengths.sum() * LENGTH
    ).astype(int)
    return np.diff(edges).tolist()


class Packed:
    """The documents as a packed sequence on this rank, forward and backward."""

    def __init__(self, name: BatchLayoutName, ranks: int, route: str) -> None:
        lengths = documents()
        self.layout, self.mask, self.route = (
            batch_layout(name, LENGTH, ranks, lengths),
            rs.documents(lengths),
            route,
        )
        generator = torch.Generator().manual_seed(dist.get_rank())
        # as a model's projections make them
        shape = (
            1,
            self.layout.tokens_per_rank,
            HEADS,
            HEAD_DIM,
        )
        *self.inputs, self.dout = (
            torch.randn(shape, generator=generator).transpose(1, 2) for _ in range(4)
        )
        self.pairs = [
            make_schedule(self.layout, self.mask, rank).num_pairs
            for rank in range(ranks)
        ]

    def __call__(self) -> None:
        inputs = [x.requires_grad_() for x in self.inputs]
        out = rs.ring_attention(
            *inputs, mask=self.mask, layout=self.layout, route=self.route
        )
        torch.autograd.grad(out, inputs, self.dout)


def one_after_the_other(inputs: list[list[Tensor]], douts: list[Tensor]) -> None:
    """Each document by itself, with PyTorch's attention."""
    for some, dout in zip(inputs, douts, strict=True):
        torch.autograd.grad(
            scaled_dot_product_attention(*some, is_causal=True), some, dout
        )


def on_two_ranks(repeats: int) -> dict[str, Any]:
    """Runs on each of two ranks."""
    cases = {name: Packed(name, 2, "ring") for name in LAYOUTS}
    is_first = dist.get_rank() == 0
    whole = [torch.randn(1, LENGTH, HEADS, HEAD_DIM).transpose(1, 2) for _ in range(4)]
    parts = [[part.detach() for part in x.split(documents(), 2)] for x in whole]
    inputs = [
        [x.requires_grad_() for x in some] for some in zip(*parts[:3], strict=True)
    ]
    alone = partial(one_after_the_other, inputs, parts[3]) if is_first else None
    seconds: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        found = {name: timed(case, threads=1) for name, case in cases.items()}
        found["one process"] = timed(alone, threads=2)
        for name, each in found.items() if repeat else ():  # the first round warms up
            seconds.setdefault(name, []).append(each)
    return {
        "seconds": {name: median(each) for name, each in seconds.items()},
        "ratios": {
            name: median(
                a / b
                for a, b in zip(seconds[name], seconds["one process"], strict=True)
            )
            for name in cases
        },
        "most_work_over_mean": {
            name: max(case.pairs) * 2 / sum(case.pairs) for name, case in cases.items()
        },
    }


def _answer(question: dict[str, Any], alone: Any) -> list[dict[str, Any]]:
    """Runs on each of four ranks with a link of its own."""
    rows = []
    cases: dict[str, Callable[[], None]] = {
        f"{name} {route}": Packed(name, RANKS, route)
        for name in LAYOUTS
        for route in ("ring", "all-gather")
    }
    for gigabits in question["gigabits"]:
        rate = f"rate {round(gigabits * 1e9)}bit burst 32kb latency 50ms"
        run(*[path("tc"), *f"qdisc replace dev {LINK} root tbf {rate}".split()])
        found = timed_in_turns(cases, question["repeats"], threads=1)
        seconds = {name: median(each) for name, each in found.items()}
        fastest = {
            name: min(seconds[f"{name} ring"], seconds[f"{name} all-gather"])
            for name in LAYOUTS
        }
        rows.append(
            {
                "gigabits": gigabits,
                "seconds": seconds,
                "zigzag_over_balanced": fastest["zigzag"] / fastest["balanced"],
            }
        )
    return rows


def main() -> None:
    """Measure, print and keep the result."""
    parser = argparse.ArgumentParser(
        description="Time packed documents on a balanced layout, on zigzag and alone."
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="interleaved repeats; the medians are reported",
    )
    parser.add_argument("--output", type=Path, default=RESULT, help="the JSON file")
    options = parser.parse_args()
    # so that the ranks are ended then too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    two, *_ = launch(on_two_ranks, 2, options.repeats, threads=1)
    for name in LAYOUTS:
        print(
            f"2 ranks, {name}: {two['seconds'][name]:.3f} s, {two['ratios'][name]:.3f} of one process x 2 threads "
            f"({two['seconds']['one process']:.3f} s); busiest over mean {two['most_work_over_mean'][name]:.3f}"
        )
    reason = namespaces.why_not("tc", "nsenter", trial="true")
    rows: list[dict[str, Any]] = []
    if reason:
        print(f"no slow links: {reason}")
    else:
        with bridged("benchmarks.documents", RANKS) as ranks:
            rows = ask(ranks, {"gigabits": GIGABITS, "repeats": options.repeats})
    for row in rows:
        times = ", ".join(
            f"{name} {seconds:.2f} s" for name, seconds in row["seconds"].items()
        )
        print(
            f"4 ranks, {row['gigabits']:g} Gbit/s: {times}; zigzag over balanced {row['zigzag_over_balanced']:.2f}"
        )
    command = shlex.join(["python", "-m", "benchmarks.documents", *sys.argv[1:]])
    result = {
        "two_ranks": two,
        "four_ranks_on_links": rows,
        "machine": describe_machine(),
    }
    options.output.write_text(
        json.dumps([{"command": command, "result": result}], indent=1) + "\n"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        serve(int(sys.argv[2]), RANKS, sys.argv[3], _answer)
    else:
        main()

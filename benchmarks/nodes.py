"""Routes over two nodes, measured against the model that chooses among them.

    python -m benchmarks.nodes

Four ranks of one thread, each in a network namespace of its own: the first two are a node and the last two another. All
hang on one bridge; what a rank sends to the other node is held to a rate, as by a network card of its own, and what it
sends inside its node is not. Every route computes the same causal attention, in turns. ``predicted`` is what
``ringspan.core.schedule.timing`` makes of the FLOPs and the two bandwidths measured beside it, and ``auto`` the route
that ``ringspan.core.schedule.choice`` takes for them. Linux, root, iproute2 and util-linux (``benchmarks.namespaces``).
"""

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

import ringspan as rs
from benchmarks import namespaces
from benchmarks.namespaces import LINK, ask, bridged, path, run, serve, swap
from benchmarks.turns import timed_in_turns
from ringspan.core.schedule.choice import choose_route
from ringspan.core.schedule.timing import Speeds, pair_flops, passes, slowest
from ringspan.core.schedule.workspace import Shape
from ringspan.measure.machine import describe_machine

RESULT: Final = Path(__file__).parent / "results" / "nodes-cpu.json"
RANKS: Final = 4
PER_NODE: Final = 2
# what no filter names is not held back
_ROOT: Final = f"qdisc add dev {LINK} root handle 1: htb"
# of what waits to be sent to the other node, beyond which it is dropped
_QUEUE_SECONDS: Final = 0.05
ROUTES: Final = (
    "ring",
    "bidirectional",
    "double-ring:2",
    "all-gather",
    "ulysses:2",
    "ulysses",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """The rate between the nodes, and one attention."""

    gigabits: float
    length: int = 8192
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    repeats: int = 3

    @property
    def layout(self) -> rs.Layout:
        return rs.Layout("zigzag", self.length, RANKS)

    @property
    def shape(self) -> Shape:
        return Shape(1, self.heads, self.kv_heads, self.head_dim, self.head_dim, 4)


CASES: Final = (
    *(Case(gigabits=gigabits) for gigabits in (0.05, 0.1, 0.25, 1)),
    Case(gigabits=0.1, heads=8, kv_heads=2),
    Case(gigabits=0.1, length=16384),
)


def why_not() -> str | None:
    """What this machine lacks to make nodes of namespaces; None when it can."""
    links = f"ip link add name {LINK} type veth peer name other && ip link add name switch type bridge"
    limits = map(shlex.join, [_tc(_ROOT), *_limits(0, 1)])
    return namespaces.why_not("tc", "nsenter", trial=" && ".join([links, *limits]))


def measure(cases: list[Case]) -> list[dict[str, Any]]:
    """What was measured and predicted of each case, from ranks that live as long as this call."""
    with bridged("benchmarks.nodes", RANKS) as ranks:
        results = ask(ranks, [asdict(case) for case in cases])
        return [
            asdict(case) | result for case, result in zip(cases, results, strict=True)
        ]


def _limits(rank: int, gigabits: float) -> list[list[str]]:
    """The commands that hold what this rank sends to the other node to a rate."""
    rate = f"{round(gigabits * 1e9)}bit"
    burst = f"rate {rate} burst 32kb cburst 32kb quantum 16000"  # small, so that small blocks see the rate too
    others = (other for other in range(RANKS) if other // PER_NODE != rank // PER_NODE)
    commands = [
        f"class replace dev {LINK} parent 1: classid 1:1 htb {burst}",
        f"qdisc replace dev {LINK} parent 1:1 bfifo limit {round(gigabits * 1e9 / 8 * _QUEUE_SECONDS)}",
        *(
            f"filter replace dev {LINK} parent 1: protocol ip prio {other + 1} u32 match ip dst 10.0.0.{other + 1}/32 "
            "flowid 1:1"
            for other in others
        ),
    ]
    return [_tc(command) for command in commands]


def _tc(command: str) -> list[str]:
    return [path("tc"), *command.split()]


def _answer(cases: list[dict[str, Any]], alone: Any) -> list[dict[str, Any]]:
    """Runs on each rank."""
    run(*_tc(_ROOT))
    return [_measure(Case(**case), dist.get_rank(), alone) for case in cases]


def _measure(case: Case, rank: int, alone: Any) -> dict[str, Any]:
    """Medians of interleaved repeats: the speeds, and each route forward and forward with backward."""
    for command in _limits(rank, case.gigabits):
        run(*command)
    generator = torch.Generator().manual_seed(rank)
    q, k, v, dout = (
        torch.randn(
            1,
            heads,
            case.layout.tokens_per_rank,
            case.head_dim,
            generator=generator,
            requires_grad=True,
        )
        for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    )

    def attention(route: str) -> Tensor:
        return rs.ring_attention(q, k, v, layout=case.layout, route=route)

    def both(route: str) -> None:
        torch.autograd.grad(attention(route), (q, k, v), dout)

    def forward(route: str) -> None:
        with torch.no_grad():
            attention(route)

    def whole() -> None:  # a block, with nothing to wait for
        with torch.no_grad():
            rs.ring_attention(q, k, v, mask=rs.full(), layout="contiguous", group=alone)

    block = torch.empty(
        case.layout.tokens_per_rank * case.shape.kv_numbers * 4, dtype=torch.uint8
    )
    timings: dict[str, Callable[[], None]] = {
        "whole": whole,
        "inside": partial(swap, block, rank ^ 1),
        "between": partial(swap, block, rank ^ PER_NODE),
    }
    for route in ROUTES:
        timings[f"{route} forward"], timings[f"{route} both"] = (
            partial(forward, route),
            partial(both, route),
        )
    medians = {
        name: median(found)
        for name, found in timed_in_turns(timings, case.repeats, threads=1).items()
    }
    flops = (
        case.layout.tokens_per_rank**2
        * pair_flops(case.shape, is_backward=False)
        / medians["whole"]
    )
    speeds = Speeds(
        flops,
        block.nbytes / medians["inside"],
        block.nbytes / medians["between"],
        PER_NODE,
    )
    routes = {}
    for route in ROUTES:
        predicted = [
            slowest(
                passes(
                    case.layout,
                    rs.causal(),
                    route,
                    case.shape,
                    speeds,
                    is_backward=is_backward,
                )
            ).seconds
            for is_backward in (False, True)
        ]
        routes[route] = {
            "forward_seconds": medians[f"{route} forward"],
            "predicted_forward_seconds": predicted[0],
            "forward_backward_seconds": medians[f"{route} both"],
            "predicted_forward_backward_seconds": sum(predicted),
        }
    auto = choose_route(case.layout, rs.causal(), case.shape, speeds).route
    return {"speeds": asdict(speeds), "routes": routes, "auto": auto}


def main() -> None:
    """Measure, print a table a case and keep the result."""
    parser = argparse.ArgumentParser(
        description="Time routes over two nodes against the model (Linux, root)."
    )
    parser.add_argument(
        "--gigabits",
        type=float,
        nargs="*",
        default=[],
        help="only these rates (Gbit/s)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="interleaved repeats; the medians are reported",
    )
    parser.add_argument("--output", type=Path, default=RESULT, help="the JSON file")
    options = parser.parse_args()
    reason = why_not()
    if reason:
        sys.exit(f"nodes: {reason}")
    # so that the ranks are ended then too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = [Case(gigabits=gigabits) for gigabits in options.gigabits] or CASES
    cases = [replace(case, repeats=options.repeats) for case in chosen]
    results = measure(cases)
    command = shlex.join(["python", "-m", "benchmarks.nodes", *sys.argv[1:]])
    row = {
        "command": command,
        "result": {"cases": results, "machine": describe_machine()},
    }
    options.output.write_text(json.dumps([row], indent=1) + "\n")
    for result in results:
        speeds = result["speeds"]
        print(
            f"{result['gigabits']:g} Gbit/s, {result['length']:,} tokens, {result['heads']} heads on "
            f"{result['kv_heads']}: {speeds['flops'] / 1e9:.0f} GFLOP/s a rank, {speeds['intra_node_bytes'] / 1e6:.0f} "
            f"and {speeds['inter_node_bytes'] / 1e6:.0f} MB/s; auto takes {result['auto']}"
        )
        for route, found in result["routes"].items():
            numbers = (
                found[f"{which}{p}_seconds"]
                for p in ("forward", "forward_backward")
                for which in ("", "predicted_")
            )
            print(f"  {route:14}" + "".join(f"{number:8.3f}" for number in numbers))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        serve(int(sys.argv[2]), RANKS, sys.argv[3], _answer)
    else:
        main()

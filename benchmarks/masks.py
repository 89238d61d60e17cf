"""What masks and layouts make of the work: a sliding window against causal, and the balance of causal over the ranks.

    python benchmarks/masks.py

The window: seconds of forward and backward, causal and with a window of 4,096 of 65,536 tokens, on a ring of 2 ranks,
taking turns. The balance: each layout's share of the causal pairs by rank, exactly, and the seconds that each rank
computed and did not wait; 1 is perfect, 2 ranks contiguous have 0.5 and 1.5.
"""

import argparse
import json
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import torch
import torch.distributed as dist

import ringspan as rs
from ringspan.bench.machine import describe_machine
from ringspan.bench.timing import timed
from ringspan.core.layout import LAYOUT_NAMES
from ringspan.core.schedule import plan
from ringspan.torch.exchange import TOTALS
from ringspan.torch.launch import launch

RESULT: Final = Path(__file__).parent / "results" / "masks-cpu.json"
RANKS: Final = 2


def measure_window(length: int, window: int, heads: int, repeats: int) -> dict[str, float]:
    """Runs on each rank."""
    layout = rs.Layout("zigzag", length, RANKS)
    masks = {"causal": rs.causal(), "window": rs.sliding_window(window)}
    tensors = _tensors(layout, heads)
    seconds: dict[str, list[float]] = {name: [] for name in masks}
    for repeat in range(repeats + 1):
        for name, mask in masks.items():
            found = timed(partial(_both, layout, mask, tensors), threads=1)
            if repeat:  # the first round warms up
                seconds[name].append(found)
    pairs = {name: sum(plan(layout, mask, rank).num_pairs for rank in range(RANKS)) for name, mask in masks.items()}
    return {
        **{f"{name}_seconds": median(found) for name, found in seconds.items()},
        "speedup": median(a / b for a, b in zip(seconds["causal"], seconds["window"], strict=True)),
        "speedup_by_pairs": pairs["causal"] / pairs["window"],
    }


def measure_balance(length: int, heads: int, repeats: int) -> dict[str, list[float]]:
    """Runs on each rank: seconds that it computed for each layout, medians of interleaved repeats."""
    seconds: dict[str, list[float]] = {name: [] for name in LAYOUT_NAMES}
    for repeat in range(repeats + 1):
        for name in LAYOUT_NAMES:
            layout = rs.Layout(name, length, RANKS)
            tensors = _tensors(layout, heads)
            dist.barrier()
            waited, started = TOTALS.exposed_seconds, time.perf_counter()
            _both(layout, rs.causal(), tensors)
            if repeat:
                seconds[name].append(time.perf_counter() - started - (TOTALS.exposed_seconds - waited))
    return {name: median(found) for name, found in seconds.items()}


def _tensors(layout: rs.Layout, heads: int) -> list[torch.Tensor]:
    """q, k, v and dout of this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (1, heads, layout.tokens_per_rank, 64)
    return [torch.randn(shape, generator=generator, requires_grad=True) for _ in range(4)]


def _both(layout: rs.Layout, mask: rs.Mask, tensors: list[torch.Tensor]) -> Any:
    """Forward and backward of one attention on this rank's part."""
    q, k, v, dout = tensors
    out = rs.ring_attention(q, k, v, mask=mask, layout=layout)
    return torch.autograd.grad(out, (q, k, v), dout)


def main() -> None:
    """Measure, print and keep both."""
    parser = argparse.ArgumentParser(description="A window against causal, and the balance of causal, on two ranks.")
    parser.add_argument("--length", type=int, default=65536, help="tokens for the window")
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--balance-length", type=int, default=16384, help="tokens for the balance")
    parser.add_argument("--heads", type=int, default=2, help="heads of 64")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    window = launch(measure_window, RANKS, options.length, options.window, options.heads, options.repeats, threads=1)[0]
    ranks = launch(measure_balance, RANKS, options.balance_length, options.heads, 2 * options.repeats + 1, threads=1)
    balance = {}
    for name in LAYOUT_NAMES:
        layout = rs.Layout(name, options.balance_length, RANKS)
        pairs = [plan(layout, rs.causal(), rank).num_pairs for rank in range(RANKS)]
        seconds = [rank[name] for rank in ranks]
        balance[name] = {
            "pairs_over_mean": [count / mean(pairs) for count in pairs],
            "seconds_over_mean": [found / mean(seconds) for found in seconds],
            "seconds": seconds,
        }
    config = {name: value for name, value in vars(options).items() if name != "output"}
    result = {"window": window, "balance": balance, "config": config}
    command = shlex.join(["python", "benchmarks/masks.py", *sys.argv[1:]])
    row = {"command": command, "result": result | {"machine": describe_machine()}}
    options.output.write_text(json.dumps([row], indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""What masks and layouts make of the work: a sliding window, the balance of causal over the ranks, packed documents.

    python benchmarks/masks.py

The window: seconds of forward and backward, causal and with a window of 4,096 of 65,536 tokens, on a ring of 2 ranks,
taking turns. The balance: each layout's share of the causal pairs by rank, exactly, and the seconds that each rank
computed and did not wait; 1 is perfect, 2 ranks contiguous have 0.5 and 1.5. Documents: 65,536 tokens packed from 200
documents against one document with as many pairs, by heads and head size, as it is and for as many pairs on the busiest
rank, and what PyTorch's kernel alone takes a pair by the size of its tile.
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

import numpy as np
import torch
import torch.distributed as dist
from turns import timed_in_turns

import ringspan as rs
from ringspan.core.names import LAYOUT_NAMES
from ringspan.core.schedule.schedule import make_schedule
from ringspan.measure.machine import describe_machine
from ringspan.torch.engine.transport.exchange import COUNTERS
from ringspan.torch.runtime.launch import launch

RESULT: Final = Path(__file__).parent / "results" / "masks-cpu.json"
RANKS: Final = 2
SHAPES: Final = ((8, 8, 64), (8, 2, 64), (8, 8, 128), (8, 2, 128), (32, 8, 128))
"""Query heads, key/value heads and head sizes with which documents are measured."""


def measure_window(
    length: int, window: int, heads: int, repeats: int
) -> dict[str, float]:
    """Runs on each rank."""
    layout = rs.Layout("zigzag", length, RANKS)
    masks = {"causal": rs.causal(), "window": rs.sliding_window(window)}
    tensors = _tensors(layout, heads)
    both = {name: partial(_both, layout, mask, tensors) for name, mask in masks.items()}
    seconds = timed_in_turns(both, repeats, threads=1)
    pairs = {
        name: sum(make_schedule(layout, mask, rank).num_pairs for rank in range(RANKS))
        for name, mask in masks.items()
    }
    return {
        **{f"{name}_seconds": median(found) for name, found in seconds.items()},
        "speedup": median(
            a / b for a, b in zip(seconds["causal"], seconds["window"], strict=True)
        ),
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
            waited, started = COUNTERS.exposed_seconds, time.perf_counter()
            _both(layout, rs.causal(), tensors)
            if repeat:
                seconds[name].append(
                    time.perf_counter() - started - (COUNTERS.exposed_seconds - waited)
                )
    return {name: median(found) for name, found in seconds.items()}


def measure_documents(
    length: int, count: int, shape: tuple[int, int, int], repeats: int
) -> dict[str, Any]:
    """Runs on each rank: many documents, cut at random, against one causal sequence with as many pairs.

    ``shape`` is query heads, key/value heads and head size.
    """
    cuts = np.sort(
        np.random.default_rng(0).choice(np.arange(1, length), count - 1, replace=False)
    )
    lengths = np.diff(np.concatenate(([0], cuts, [length])))
    pairs = int((lengths * (lengths + 1) // 2).sum())
    one = int((2 * pairs) ** 0.5)
    cases = {
        "documents": (
            rs.Layout("zigzag", length, RANKS),
            rs.documents(lengths.tolist()),
        ),
        "one": (rs.Layout("zigzag", one, RANKS), rs.causal()),
    }
    both = {
        name: partial(_both, layout, mask, _tensors(layout, *shape))
        for name, (layout, mask) in cases.items()
    }
    seconds = timed_in_turns(both, repeats, threads=1)
    ratio = median(
        a / b for a, b in zip(seconds["documents"], seconds["one"], strict=True)
    )
    sizes = dict(zip(("heads", "kv_heads", "head_dim"), shape, strict=True))
    times = {f"{name}_seconds": median(found) for name, found in seconds.items()}
    by_rank = [
        make_schedule(*cases["documents"], rank).num_pairs for rank in range(RANKS)
    ]
    # random lengths fall unevenly on the ranks, and the slowest is waited for
    busiest = max(by_rank) / mean(by_rank)
    return {
        **sizes,
        **times,
        "ratio": ratio,
        "busiest_over_mean": busiest,
        "ratio_of_pairs": ratio / busiest,
        "one_length": one,
    }


def measure_kernel(heads: int) -> dict[str, float]:
    """Seconds a pair of one causal tile, forward and backward, over those of a tile of 6,144 rows; one thread."""
    sizes = (6144, 2048, 1024, 768, 512, 328, 192, 64)
    tensors = {
        n: [torch.randn(1, heads, n, 64, requires_grad=True) for _ in range(4)]
        for n in sizes
    }
    found: dict[int, list[float]] = {n: [] for n in sizes}
    for repeat in range(6):
        for n, (q, k, v, dout) in tensors.items():
            times = max(1, 4_000_000 // n**2)
            started = time.perf_counter()
            for _ in range(times):
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True
                )
                torch.autograd.grad(out, (q, k, v), dout)
            if repeat:
                found[n].append(
                    (time.perf_counter() - started) / times / (n * (n + 1) / 2)
                )
    return {str(n): median(found[n]) / median(found[sizes[0]]) for n in sizes}


def _tensors(
    layout: rs.Layout, heads: int, kv_heads: int | None = None, head_dim: int = 64
) -> list[torch.Tensor]:
    """q, k, v and dout of this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shapes = (
        (1, n, layout.tokens_per_rank, head_dim)
        for n in (heads, kv_heads or heads, kv_heads or heads, heads)
    )
    return [
        torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes
    ]


def _both(layout: rs.Layout, mask: rs.Mask, tensors: list[torch.Tensor]) -> Any:
    """Forward and backward of one attention on this rank's part."""
    q, k, v, dout = tensors
    out = rs.ring_attention(q, k, v, mask=mask, layout=layout)
    return torch.autograd.grad(out, (q, k, v), dout)


def main() -> None:
    """Measure, print and keep both."""
    parser = argparse.ArgumentParser(
        description="A window against causal, and the balance of causal, on two ranks."
    )
    parser.add_argument(
        "--length", type=int, default=65536, help="tokens for the window"
    )
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument(
        "--balance-length", type=int, default=16384, help="tokens for the balance"
    )
    parser.add_argument("--heads", type=int, default=2, help="heads of 64")
    parser.add_argument(
        "--documents",
        type=int,
        default=200,
        help="documents packed into --length tokens",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    window = launch(
        measure_window,
        RANKS,
        options.length,
        options.window,
        options.heads,
        options.repeats,
        threads=1,
    )[0]
    ranks = launch(
        measure_balance,
        RANKS,
        options.balance_length,
        options.heads,
        2 * options.repeats + 1,
        threads=1,
    )
    balance = {}
    for name in LAYOUT_NAMES:
        layout = rs.Layout(name, options.balance_length, RANKS)
        pairs = [
            make_schedule(layout, rs.causal(), rank).num_pairs for rank in range(RANKS)
        ]
        seconds = [rank[name] for rank in ranks]
        balance[name] = {
            "pairs_over_mean": [count / mean(pairs) for count in pairs],
            "seconds_over_mean": [found / mean(seconds) for found in seconds],
            "seconds": seconds,
        }
    config = {name: value for name, value in vars(options).items() if name != "output"}
    measured = [
        launch(
            measure_documents,
            RANKS,
            options.length,
            options.documents,
            shape,
            options.repeats,
            threads=1,
        )[0]
        for shape in SHAPES
    ]
    kernel = launch(measure_kernel, 1, 8, threads=1)[0]
    result = {
        "window": window,
        "balance": balance,
        "documents": measured,
        "kernel_by_rows": kernel,
        "config": config,
    }
    command = shlex.join(["python", "benchmarks/masks.py", *sys.argv[1:]])
    row = {"command": command, "result": result | {"machine": describe_machine()}}
    options.output.write_text(json.dumps([row], indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

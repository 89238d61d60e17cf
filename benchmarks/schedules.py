"""Cost of one rank's schedule: CPU seconds, the most memory, and how many tiles it has, on 8 to 1,024 ranks.

    OMP_NUM_THREADS=1 python -m benchmarks.schedules [VERSION] [MOST_RANKS]

16,384 tokens per rank. A document is moved to the end before each repeat, since a schedule that was made is remembered;
memory is measured apart from time. To compare with an older version, run it again with that one's ``PYTHONPATH`` and a
name for it: its rows are added to the file.
"""

import json
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, Final

import numpy as np

import ringspan as rs
from benchmarks.layouts import drawn
from ringspan.core.geometry.layout import CustomLayout, Layout, layout_name
from ringspan.core.schedule.schedule import make_schedule
from ringspan.measure.machine import describe_machine

RESULT: Final = Path(__file__).parent / "results" / "schedules-cpu.json"
TOKENS: Final = 16_384
RANKS: Final = (8, 64, 256, 1_024)
REPEATS: Final = 3
RUNS: Final = 16  # of each rank, in the custom layout
MOST_DEALT: Final = 256  # ranks of it: a document of half the length has each of 16 runs needed by 1,024 ranks


def one_half(total: int) -> list[int]:
    """One of half the length among equal ones of at least 300 tokens, at most 4,000."""
    each = max(300, total // 8_000)
    return [total - total // 2 // each * each, *[each] * (total // 2 // each)]


DOCUMENTS: Final[dict[str, Callable[[int], list[int]]]] = {
    "lognormal": lambda total: drawn(total, 0, 1.0),
    "heavy tail": lambda total: drawn(total, 0, 2.0),
    "one of half the length": one_half,
}


def custom(total: int, ranks: int) -> CustomLayout:
    """Runs of random lengths, dealt out at random."""
    numbers = np.random.default_rng(0)
    edges = [
        0,
        *np.sort(
            numbers.choice(total - 1, RUNS * ranks - 1, replace=False) + 1
        ).tolist(),
        total,
    ]
    parts: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for run, owner in enumerate(
        numbers.permutation(np.arange(RUNS * ranks) % ranks).tolist()
    ):
        parts[owner].append((edges[run], edges[run + 1] - edges[run]))
    return CustomLayout.of(parts, total)


def row(documents: str, layout: str, ranks: int) -> dict[str, Any]:
    """One layout of one kind of documents."""
    total = TOKENS * ranks
    lengths = DOCUMENTS[documents](total)
    dealt = custom(total, ranks) if layout == "custom" else None
    solving, seconds, peak, tiles = [], [], 0, 0
    for first in range(1 + REPEATS):
        mask = rs.documents(lengths[first:] + lengths[:first])
        began = process_time()
        made: Layout = dealt or (
            rs.balanced(mask, length=total, ranks=ranks)
            if layout == "balanced"
            else Layout(layout_name(layout), total, ranks)
        )
        solved = process_time()
        if not first:
            tracemalloc.start()
        schedule = make_schedule(made, mask, ranks // 3)
        if not first:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            tiles = sum(len(hop.bands) for hop in schedule.hops)
            continue
        solving.append(solved - began)
        seconds.append(process_time() - solved)
    found = {
        "documents": documents,
        "num_documents": len(lengths),
        "ranks": ranks,
        "layout": layout,
        "tiles": tiles,
    }
    found |= {
        "median_seconds": round(median(seconds), 4),
        "best_seconds": round(min(seconds), 4),
    }
    found |= {"peak_megabytes": round(peak / 1e6, 1)}
    return found | (
        {"solver_median_seconds": round(median(solving), 4)}
        if layout == "balanced"
        else {}
    )


def rows(most_ranks: int) -> Iterator[dict[str, Any]]:
    for ranks in (ranks for ranks in RANKS if ranks <= most_ranks):
        for documents in DOCUMENTS:
            for layout in ("contiguous", "zigzag", "striped", "custom", "balanced"):
                if layout == "custom" and ranks > MOST_DEALT:
                    continue
                yield row(documents, layout, ranks)
                print(ranks, documents, layout, file=sys.stderr, flush=True)


def main(version: str = "rows", most_ranks: str = "1024") -> None:
    """Measure and write."""
    facts: dict[str, Any] = (
        json.loads(RESULT.read_text(encoding="utf-8")) if version != "rows" else {}
    )
    if version == "rows":
        command = "OMP_NUM_THREADS=1 python -m benchmarks.schedules"
        facts = {
            "command": command,
            "machine": describe_machine(),
            "numpy": np.__version__,
            "tokens_per_rank": TOKENS,
        }
    RESULT.write_text(
        json.dumps(facts | {version: list(rows(int(most_ranks)))}, indent=1) + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

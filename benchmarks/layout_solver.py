"""How long a balanced layout takes: 10,000 documents around 2,048 tokens, on 64 and on 1,024 ranks.

    OMP_NUM_THREADS=1 python -m benchmarks.layout_solver

A document is moved to the end before each repeat, since a layout that was made is remembered. CPU seconds of the one
thread that computes it.
"""

import json
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, Final

import ringspan as rs
from benchmarks.layouts import lognormal
from ringspan.measure.machine import describe_machine

RESULT: Final = Path(__file__).parent / "results" / "layout-solver-cpu.json"
DOCUMENTS: Final = 10_000
RANKS: Final = (64, 1_024)
REPEATS: Final = 15


def row(lengths: list[int], ranks: int) -> dict[str, Any]:
    """Of one number of ranks."""
    seconds = []
    for first in range(1 + REPEATS):
        mask = rs.documents(lengths[first:] + lengths[:first])
        began = process_time()
        rs.balanced(mask, length=sum(lengths), ranks=ranks)
        seconds.append(process_time() - began)
    warm = seconds[1:]
    times = {
        "best_seconds": round(min(warm), 4),
        "median_seconds": round(median(warm), 4),
    }
    return {
        "documents": len(lengths),
        "length_tokens": sum(lengths),
        "ranks": ranks,
        "repeats": REPEATS,
    } | times


def main() -> None:
    """Measure and write."""
    lengths = lognormal(64_000_000)[:DOCUMENTS]
    rows = [row(lengths, ranks) for ranks in RANKS]
    facts = {
        "command": "OMP_NUM_THREADS=1 python -m benchmarks.layout_solver",
        "machine": describe_machine(),
    }
    RESULT.write_text(
        json.dumps(facts | {"rows": rows}, indent=1) + "\n", encoding="utf-8"
    )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()

"""Combinations of options at random, on rings and on one process: ``python -m tests.combinations.run``.

Draws until a number of draws or of seconds is reached (RINGSPAN_DRAWS, RINGSPAN_SECONDS), from a seed (RINGSPAN_SEED)
that it prints, and writes what came of them to build/combinations.json. Of a draw that fails it prints the line that
runs it again, and the smallest one that fails alike::

    python -m tests.combinations.run "family=gpt2; mesh=ring 3; folds=2"
"""

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import torch

from ringspan.torch.runtime.forks import serve_forks
from tests.combinations.judging import Outcome, judge, shrunk
from tests.combinations.tables import Draw, drawn, line_of, read, settled
from tests.pool import Pool

RESULT: Final = Path("build/combinations.json")


class Summary:
    """Counts of outcomes, by kind and by each row of each table."""

    def __init__(self, seed: int) -> None:
        self._started, self._seed = time.monotonic(), seed
        self.kinds: Counter[str] = Counter()
        self._rows: dict[str, dict[str, Counter[str]]] = {}
        self._refusals: Counter[str] = Counter()
        self._worst: dict[str, dict[str, float]] = {}
        self._failures: list[dict[str, Any]] = []

    def add(self, draw: Draw, outcome: Outcome) -> None:
        self.kinds[outcome.kind] += 1
        for name, row in draw.items():
            self._rows.setdefault(name, {}).setdefault(row, Counter())[
                outcome.kind
            ] += 1
        if outcome.kind == "refused":
            self._refusals[outcome.said] += 1
        worst = self._worst.setdefault(draw["dtype"], {})
        for name, error in outcome.errors.items():
            worst[name] = max(worst.get(name, 0.0), error)

    def add_failure(self, draw: Draw, outcome: Outcome, least: Draw) -> None:
        lines = {"draw": line_of(draw), "smallest": line_of(least)}
        self._failures.append({"kind": outcome.kind, "said": outcome.said, **lines})

    def write(self) -> None:
        RESULT.parent.mkdir(exist_ok=True)
        seen = {
            "seed": self._seed,
            "draws": self.kinds.total(),
            "seconds": round(time.monotonic() - self._started),
            "outcomes": self.kinds,
            "largest relative errors": self._worst,
            "failures": self._failures,
            "refusals": dict(self._refusals.most_common()),
            "outcomes by row": self._rows,
        }
        RESULT.write_text(json.dumps(seen, indent=1) + "\n")


def main() -> int:
    asked = _arguments()
    torch.set_num_threads(1)
    serve_forks("torch._dynamo", "tests.combinations.runs")
    with closing(Pool(asked.ranks)) as pool:
        if asked.draw is not None:
            return _again(pool, settled(read(asked.draw), asked.ranks))
        return _all(pool, asked)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Combinations of options at random, on rings and on one process."
    )
    parser.add_argument("draw", nargs="?", help="run this one alone")
    parser.add_argument(
        "--draws", type=int, default=int(os.environ.get("RINGSPAN_DRAWS", "2000"))
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float(os.environ.get("RINGSPAN_SECONDS", "inf")),
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=int(os.environ.get("RINGSPAN_SEED", str(time.time_ns() % 10**6))),
    )
    parser.add_argument(
        "--ranks", type=int, default=4, help="of the pool, and so the most of a mesh"
    )
    return parser.parse_args()


def _again(pool: Pool, draw: Draw) -> int:
    outcome = judge(pool, draw)
    print(f"{outcome.kind}: {outcome.said}")
    print("  ".join(f"{name} {error:.2g}" for name, error in outcome.errors.items()))
    return not outcome.is_right


def _all(pool: Pool, asked: argparse.Namespace) -> int:
    print(f"seed {asked.seed}: {asked.draws} draws, results in {RESULT}", flush=True)
    generator, summary, deadline = (
        random.Random(asked.seed),
        Summary(asked.seed),
        time.monotonic() + asked.seconds,
    )
    failed = 0
    for number in range(asked.draws):
        if time.monotonic() > deadline:
            break
        draw = drawn(generator, asked.ranks)
        outcome = judge(pool, draw)
        summary.add(draw, outcome)
        if not outcome.is_right:
            failed += 1
            print(
                f"{number}: {outcome.kind}: python -m tests.combinations.run {line_of(draw)!r}",
                flush=True,
            )
            least, outcome = shrunk(pool, draw, outcome)
            print(
                f"  smallest: {line_of(least)!r}\n  {outcome.said[:1500]}", flush=True
            )
            summary.add_failure(draw, outcome, least)
        summary.write()
    print(", ".join(f"{count} {kind}" for kind, count in summary.kinds.most_common()))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

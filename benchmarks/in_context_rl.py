"""What examples/in_context_rl measured: return against trajectories in context, as JSON and pictures.

    torchrun --nproc-per-node 2 examples/in_context_rl/compare.py --world grid --result runs/grid.json
    torchrun --nproc-per-node 1 examples/in_context_rl/compare.py --world point --result runs/point.json ...
    torchrun --nproc-per-node 2 examples/in_context_rl/compare.py --world point --result runs/point.json ...
    python -m benchmarks.in_context_rl runs/grid.json runs/point.json
    python -m benchmarks.tables

Returns are means over all tasks of the evaluation, of the last attempt in a context, and of the last quarter of them,
which is less noisy. Intervals are those of Student's t over seeds, 95%.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from ringspan.measure.machine import describe_machine
from ringspan.report.drawing import svg
from ringspan.report.evaluation import curves

ROOT: Final = Path(__file__).parents[1]
RESULT: Final = ROOT / "benchmarks" / "results" / "in-context-rl-cpu.json"
DOCS: Final = ROOT / "docs"
STUDENT: Final = {
    2: 12.706,
    3: 4.303,
    4: 3.182,
    5: 2.776,
    6: 2.571,
    7: 2.447,
    8: 2.365,
    9: 2.306,
    10: 2.262,
}
"""Quantiles of 97.5% by the number of seeds."""
NAMES: Final = {"bc": "behaviour cloning, 1", "1": "decision transformer, 1"}


def interval(values: np.ndarray) -> float | None:
    """Half of what 95% of such seeds' means (seeds,) lie in."""
    seeds = len(values)
    return (
        None
        if seeds < 2
        else round(float(STUDENT[seeds] * values.std(ddof=1) / seeds**0.5), 2)
    )


def by_kind(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Behaviour cloning, then by trajectories."""
    kinds = sorted(
        {row["kind"] for row in rows},
        key=lambda kind: (kind != "bc", kind != "bc" and int(kind)),
    )
    return {kind: [row for row in rows if row["kind"] == kind] for kind in kinds}


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per kind of agent; ``gain`` is that of the last quarter over the kind before, seed by seed."""
    made, before = [], {}
    for kind, own in by_kind(rows).items():
        returns = np.array([row["returns"] for row in own])
        ends = {
            "last": returns[:, -1],
            "quarter": returns[:, -max(1, returns.shape[1] // 4) :].mean(1),
        }
        by_seed = dict(zip((row["seed"] for row in own), ends["quarter"], strict=True))
        gains = np.array(
            [by_seed[seed] - before[seed] for seed in by_seed if seed in before]
        )
        before = by_seed
        made.append(
            {
                "kind": kind,
                "trajectories": own[0]["trajectories"],
                "tokens": own[0]["tokens"],
                "ranks": own[0]["ranks"],
                "seeds": len(own),
                "first_return": round(float(returns[:, 0].mean()), 2),
                **{
                    f"{name}_return": round(float(end.mean()), 2)
                    for name, end in ends.items()
                },
                **{f"{name}_interval": interval(end) for name, end in ends.items()},
                "gain": round(float(gains.mean()), 2) if len(gains) else None,
                "gain_interval": interval(gains),
            }
        )
    return made


def groups(count: int) -> list[slice]:
    """Attempts that are drawn as one point: each of the first four, then two groups for each doubling."""
    ends = [0]
    while ends[-1] < count:
        ends.append(min(count, ends[-1] + max(1, (1 << ends[-1].bit_length()) // 4)))
    return [slice(start, end) for start, end in pairwise(ends)]


def attempt_by_attempt(kind: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A curve: the return of attempts in a context, over seeds."""
    points, every = [], np.array([row["returns"] for row in rows])
    for group in groups(every.shape[1]):
        returns = every[:, group].mean(1)
        mean, half = float(returns.mean()), interval(returns)
        # That of two seeds is so wide that nothing else could be seen.
        low, high = (
            (None, None)
            if half is None or len(rows) < 3
            else (mean - half, mean + half)
        )
        points.append(
            {
                "length": group.stop,
                "return": mean,
                "low": low,
                "high": high,
                "items": len(rows),
            }
        )
    return {"model": NAMES.get(kind, f"{kind} trajectories in context"), "rows": points}


def main(files: list[Path]) -> None:
    """Write the result and the pictures."""
    worlds = {}
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        world, rows = found["options"]["world"], found["rows"]
        worlds[world] = {**found, "table": table(rows)}
        drawn = [attempt_by_attempt(kind, own) for kind, own in by_kind(rows).items()]
        picture = curves(
            drawn, "return", "attempt in a context", "return", unit="attempts"
        )
        (DOCS / f"in-context-rl-{world}.svg").write_text(svg(picture), encoding="utf-8")
    facts = {
        "command": "python -m benchmarks.in_context_rl",
        "machine": describe_machine(),
        "worlds": worlds,
    }
    RESULT.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])

"""What examples/in_context_rl measured: tables of return against trajectories in context, and their JSON.

    torchrun --nproc-per-node 2 examples/in_context_rl/compare.py --world grid --result runs/grid.json
    torchrun --nproc-per-node 2 examples/in_context_rl/compare.py --world pendulum --result runs/pendulum.json
    python -m benchmarks.in_context_rl runs/grid.json runs/pendulum.json

The return of a seed is that of the last attempt in a context, over all tasks of the evaluation. Intervals are those of
Student's t over seeds, 95%.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np

from ringspan.measure.bench.machine import describe_machine

RESULT: Final = Path(__file__).parent / "results" / "in-context-rl-cpu.json"
STUDENT: Final = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Quantiles of 97.5% by the number of seeds."""


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per kind of agent: behaviour cloning, then by trajectories."""
    made = []
    for kind in sorted({row["kind"] for row in rows}, key=lambda kind: (kind != "bc", kind != "bc" and int(kind))):
        own = [row for row in rows if row["kind"] == kind]
        first, last = (np.array([row["returns"][at] for row in own]) for at in (0, -1))
        half = STUDENT[len(own)] * last.std(ddof=1) / len(own) ** 0.5 if len(own) > 1 else None
        made.append(
            {
                "kind": kind,
                "trajectories": own[0]["trajectories"],
                "tokens": own[0]["tokens"],
                "seeds": len(own),
                "first_return": round(float(first.mean()), 2),
                "last_return": round(float(last.mean()), 2),
                "interval": None if half is None else round(float(half), 2),
            }
        )
    return made


def main(files: list[Path]) -> None:
    """Write the result, and print the tables as Markdown."""
    worlds = {}
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        world = found["options"]["world"]
        worlds[world] = {**found, "table": table(found["rows"])}
        heads = (f"{world}: trajectories", "tokens", "first attempt", "last attempt", "seeds")
        print("", f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads), sep="\n")
        for row in worlds[world]["table"]:
            interval = "" if row["interval"] is None else f" ± {row['interval']}"
            print(
                f"| {row['kind']} | {row['tokens']:,} | {row['first_return']} | {row['last_return']}{interval} | "
                f"{row['seeds']} |"
            )
    facts = {"command": "python -m benchmarks.in_context_rl", "machine": describe_machine(), "worlds": worlds}
    RESULT.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])

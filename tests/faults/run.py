"""Strike all faults, many times, and keep what was seen: ``make faults``. Leave the machine alone meanwhile.

A row a fault lands in ``benchmarks/results/faults-cpu.json``; names as arguments run only some of them, ``kill=5`` one
of them five times.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ringspan.measure.machine import describe_machine
from tests.faults.faults import FAULTS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "faults-cpu.json"
# Faults whose figures the test suite holds already: what strikes, how often, and the test.
TESTED = {
    "flipped, cut, missing and stale files": (200, "tests/checkpoints/test_checkpoint.py::test_every_damage_is"),
    "a full disk": (1, "tests/checkpoints/test_checkpoint.py::test_a_full_disk"),
    "a NaN or Inf on one rank": (3, "tests/train/test_guard.py::test_all_ranks_skip"),
    "mutated manifests, shards and configurations": (10_000, "tests/faults/test_fuzz.py"),
    "unequal input to one ring": (12, "tests/faults/test_unequal.py::test_unequal"),
    "a wrong mesh": (10, "tests/faults/test_unequal.py::test_a_wrong_mesh"),
}


def main(names: list[str]) -> None:
    """Run the named faults, or all; exit code 1 when a promise is not kept."""
    rows = {} if not names or not RESULTS.exists() else {row["name"]: row for row in json.loads(RESULTS.read_text())}
    with tempfile.TemporaryDirectory(prefix="ringspan-faults-") as folder:
        for name in names or [*FAULTS, "tested"]:
            for row in _tested() if name == "tested" else [_struck(name, Path(folder))]:
                rows[row["name"]] = row | {"machine": describe_machine()}
                print(f"{row['passed']:>6} of {row['tries']:<6} {row['fault']}  {row['figures']}", flush=True)
                for failure in row["failures"]:
                    print(f"       {failure}", flush=True)
                RESULTS.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    sys.exit(any(row["passed"] < row["tries"] for row in rows.values()))


def _struck(argument: str, folder: Path) -> dict[str, Any]:
    name, _, wanted = argument.partition("=")
    strike, times = FAULTS[name]
    times = int(wanted) if wanted else times
    started = time.monotonic()
    row = strike(folder) if times is None else strike(folder, times)
    return {"name": name, **row.__dict__, "seconds": round(time.monotonic() - started)}


def _tested() -> list[dict[str, Any]]:
    rows = []
    for fault, (tries, test) in TESTED.items():
        started = time.monotonic()
        path, _, name = test.partition("::")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", path, "-k", name or "test"],
            cwd=ROOT,
            env={**os.environ, "RINGSPAN_FUZZ_FILES": "2500"},
            capture_output=True,
            text=True,
        )
        rows.append(
            {
                "name": fault,
                "fault": fault,
                "promise": f"asserted by {test}",
                "tries": tries,
                "passed": tries if done.returncode == 0 else 0,
                "figures": {"pytest": done.stdout.strip().splitlines()[-1]},
                "failures": [] if done.returncode == 0 else [done.stdout[-2000:]],
                "seconds": round(time.monotonic() - started),
            }
        )
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])

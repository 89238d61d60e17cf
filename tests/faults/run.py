"""Strike all faults, many times, and keep what was seen: ``make faults``. Leave the machine alone meanwhile.

A row a fault lands in ``benchmarks/results/faults-cpu.json``; names as arguments run only some of them, ``kill=5`` one
of them five times.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ringspan.measure.machine import describe_machine
from tests.faults.faults import FAULTS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "faults-cpu.json"


def main(names: list[str]) -> None:
    """Run the named faults, or all; exit code 1 when a promise is not kept."""
    rows = (
        {}
        if not names or not RESULTS.exists()
        else {row["name"]: row for row in json.loads(RESULTS.read_text())}
    )
    with tempfile.TemporaryDirectory(prefix="ringspan-faults-") as folder:
        for name in names or FAULTS:
            row = _struck(name, Path(folder))
            rows[row["name"]] = row | {"machine": describe_machine()}
            print(
                f"{row['passed']:>6} of {row['tries']:<6} {row['fault']}  {row['figures']}",
                flush=True,
            )
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


if __name__ == "__main__":
    main(sys.argv[1:])

"""Everything that is to be measured on one CUDA device, in one run.

    python -m benchmarks.gpu                       # writes benchmarks/results/gpu-<device>.json
    python -m benchmarks.gpu --rows ring-8k,merge  # only these; the others in the file stay
    python -m benchmarks.gpu --quick --output /tmp # small sizes, on a CPU too: a dry run

A process measures row after row, and another goes on where one dies or takes too long. Each row is written as soon as
it is there, so that a failure, or the end of the time, loses nothing else: such a row holds its error. The file says
device, driver and versions. Rows that begin with ``trace`` need no device, and run where there is none.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Final

import torch

from benchmarks.gpu.rows import ROWS, STEPS
from ringspan.measure.machine import describe_machine

RESULTS: Final = Path(__file__).parents[1] / "results"
# What to reach: a rank's hops by the fastest kernel at the same FLOPs, and what transfers may cost of the time.
MARKS: Final = {
    "ring-8k": {"forward": 0.97, "backward": 0.96},
    "ring-32k": {"forward": 0.98, "backward": 0.98},
    "ring-documents": {"forward": 0.92, "backward": 0.92},
    "ring-window": {"forward": 0.85, "backward": 0.85},
}
MOST_TRANSFER_SHARE: Final = 0.02
LEAST_SHARE_OF_MATMUL: Final = 0.5
_PREFIX: Final = "row: "
_ROOT: Final = Path(__file__).parents[2]


def main(arguments: list[str] | None = None) -> None:
    """Measure the rows that were asked for and keep each as soon as it is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(ROWS), help="which, with commas")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, for a dry run"
    )
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="folder of the result"
    )
    parser.add_argument("--name", help="file name, when it is not that of the device")
    parser.add_argument(
        "--budget", type=float, default=900.0, help="seconds for all of it"
    )
    parser.add_argument(
        "--row-seconds", type=float, default=150.0, help="seconds for one row"
    )
    # be the process that measures
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = options.rows.split(",")
    if unknown := sorted(set(names) - set(ROWS)):
        raise SystemExit(
            f"--rows: no row is called {', '.join(unknown)}; choose from {', '.join(ROWS)}"
        )
    if options.serve:
        _serve(names, options.quick)
        return
    needs_device = any(not name.startswith("trace") for name in names)
    if needs_device and not torch.cuda.is_available() and not options.quick:
        raise SystemExit("there is no CUDA device; --quick makes a dry run on the CPU")
    machine = describe_machine()
    options.output.mkdir(parents=True, exist_ok=True)
    device = ("quick-" if options.quick else "") + machine["device"].lower().replace(
        " ", "-"
    )
    path = options.output / f"{options.name or 'gpu-' + device}.json"
    kept = (
        json.loads(path.read_text())
        if path.exists()
        else {"machine": machine, "rows": {}}
    )
    rows = kept["rows"]
    for name, row in measure(names, options.quick, options.budget, options.row_seconds):
        rows[name] = row
        found = {
            "command": "python -m benchmarks.gpu",
            "machine": kept["machine"],
            "summary": summary(rows),
        }
        path.write_text(json.dumps(found | {"rows": rows}, indent=1) + "\n")
        outcome = row.get("error", "measured").splitlines()[-1]
        print(
            f"{name}: {outcome} ({row['seconds']:.0f} s)", file=sys.stderr, flush=True
        )


def measure(
    names: list[str], quick: bool, budget: float, limit: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row with its result or its error, and the seconds that it took."""
    end, left = time.monotonic() + budget, list(names)
    while left:
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            "--serve",
            "--rows",
            ",".join(left),
        ]
        yield from _follow(command + ["--quick"] * quick, left, end, limit)


def _follow(
    command: list[str], left: list[str], end: float, limit: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of one process until it ends or has to be ended; they are taken from ``left``."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=_ROOT
    )
    lines, errors = Queue[str | None](), list[str]()
    assert process.stdout and process.stderr, "both are piped"
    readers = [
        threading.Thread(
            target=lambda out: [*map(lines.put, out), lines.put(None)],
            args=(process.stdout,),
        ),
        threading.Thread(target=errors.extend, args=(process.stderr,)),
    ]
    for reader in readers:
        reader.start()
    started = time.monotonic()
    try:
        while left:
            seconds = min(limit, end - started)
            problem, row = "", None
            try:
                line = lines.get(timeout=max(seconds, 0.0))
            except Empty:
                problem = f"not measured: it took longer than {max(seconds, 0.0):.0f} s"
            else:
                if line is None:
                    process.wait()
                    readers[1].join()
                    problem = (
                        "".join(errors).strip()[-2000:]
                        or f"it ended with {process.returncode}"
                    )
                elif not line.startswith(_PREFIX):
                    continue  # what a library has printed
                else:
                    row = json.loads(line.removeprefix(_PREFIX))
            took, started = time.monotonic() - started, time.monotonic()
            yield left.pop(0), (row or {"error": problem}) | {"seconds": took}
            if problem:
                return
    finally:
        process.kill()
        process.wait()
        for reader in readers:
            reader.join()


def _serve(names: list[str], quick: bool) -> None:
    """Measure here, and print a line a row."""
    for name in names:
        try:
            row: dict[str, Any] = {"result": ROWS[name](quick)}
        except Exception:
            row = {"error": traceback.format_exc(limit=-4)[-2000:]}
        print(_PREFIX + json.dumps(row), flush=True)
        if "CUDA error" in row.get("error", ""):
            os._exit(1)  # such a context is of no use any more
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """Each measured number beside its mark."""
    results = {name: row["result"] for name, row in rows.items() if "result" in row}
    found: dict[str, Any] = {}
    for name in MARKS.keys() & results.keys():
        for kind, mark in MARKS[name].items():
            found[f"{name} {kind}"] = {
                "measured": results[name]["efficiency"][kind],
                "at_least": mark,
            }
            share = results[name]["transfer_share"][kind]
            found[f"{name} {kind} transfers"] = {
                "measured": share,
                "at_most": MOST_TRANSFER_SHARE,
            }
    for name in STEPS.keys() & results.keys():
        step, traced = results[name], results.get(f"trace-{name}")
        if "facts" in results:
            share = (
                step["flops_per_second"] / results["facts"]["matmul_flops_per_second"]
            )
            found[f"{name} of matmul"] = {
                "measured": share,
                "at_least": LEAST_SHARE_OF_MATMUL,
            }
        if traced and "peak_bytes" in step:
            ratio = step["peak_bytes"] / traced["peak_bytes"]
            found[f"{name} memory over trace"] = {
                "measured": ratio,
                "at_least": 0.97,
                "at_most": 1.03,
            }
            ratio = step["reserved_bytes"] / step["peak_bytes"]
            found[f"{name} reserve over peak"] = {"measured": ratio, "at_most": 1.08}
    return dict(sorted(found.items()))


if __name__ == "__main__":
    main()

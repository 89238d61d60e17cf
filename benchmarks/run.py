"""Run the benchmarks that the documentation quotes and keep their results: ``make bench``, alone on the machine.

Each command's JSON lands in ``benchmarks/results/<name>.json`` as a list of {"command", "result"}; the result names the
machine and the versions. Pass names (attention, routes, step, memory, context) to run only some.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
ATTENTION = (
    "ringspan bench attention --ranks 2 --length {length} --dtype {dtype} "
    "--kv-heads {kv_heads} --repeats 7 --json"
)
COMMANDS = {
    "attention": [
        ATTENTION.format(length=length, dtype=dtype, kv_heads=kv_heads)
        for length in (8192, 16384)
        for dtype in ("float32", "bfloat16")
        for kv_heads in (8, 2)
    ],
    "routes": [
        f"ringspan bench attention --ranks 2 --length 8192 --route {route} --mask {mask} --repeats 5 --json"
        for mask in ("causal", "window:1024")
        for route in ("ring", "bidirectional", "all-gather", "pass-q", "ulysses")
    ],
    "step": [
        f"ringspan bench step --length 8192 --dtype {dtype} --json"
        for dtype in ("float32", "bfloat16")
    ],
    "context": [
        "python -m benchmarks.context --budget 4e9 --options off --dtype bfloat16",
        "python -m benchmarks.context --budget 16e9 --options off --dtype bfloat16",
        "python -m benchmarks.context --budget 4e9 --options on --dtype bfloat16 --start 61696 --trials 1",
        "python -m benchmarks.context --budget 4e9 --options on --dtype bfloat16 --start 16384 --trials 1",
        *(
            f"python -m benchmarks.context --budget {budget} --options {options} --dtype bfloat16 --start {start} "
            f"--trials 1 --rows-in {rows_in}"
            for budget, options, start, rows_in in (
                ("4e9", "on", 16384, 64),
                ("4e9", "on", 61696, 64),
                ("16e9", "off", 23946, 1024),
                ("16e9", "on", 383136, 1024),
                ("16e9", "on", 780000, 1024),
            )
        ),
    ],
    "memory": ["python -m benchmarks.memory --length 8192 --rings 1,2,4"],
}


def main() -> None:
    """Run the named groups of commands, or all."""
    RESULTS.mkdir(exist_ok=True)
    for name in sys.argv[1:] or COMMANDS:
        rows = []
        for command in COMMANDS[name]:
            print(command, file=sys.stderr, flush=True)
            arguments = [
                sys.executable,
                "-m",
                *shlex.split(command.removeprefix("python -m ")),
            ]
            done = subprocess.run(
                arguments, stdout=subprocess.PIPE, text=True, check=True
            )
            rows.append({"command": command, "result": json.loads(done.stdout)})
        (RESULTS / f"{name}-cpu.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

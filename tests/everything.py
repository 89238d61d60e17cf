"""Run every check that `make test` leaves out, one after the other, and write what each ran and saw to one file.

`python -m tests.everything` runs all of them, `python -m tests.everything mutants fuzz` those. A target that fails does
not stop the next one; the exit code is 1 if any failed.
"""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

TARGETS: Final = (
    "long",
    "mutants",
    "fuzz",
    "docs-check",
    "models",
    "trainers",
    "faults",
    "packed",
    "compat",
)
RESULT: Final = Path("build/everything.md")
# pytest's last line; some targets run it twice
COUNTS: Final = re.compile(r"\d+ (passed|failed|error).* in [\d.]+s")


def main() -> int:
    unknown = sorted(set(sys.argv[1:]) - set(TARGETS))
    if unknown:
        print(
            f"no such target: {', '.join(unknown)}; choose of {', '.join(TARGETS)}",
            file=sys.stderr,
        )
        return 2
    RESULT.parent.mkdir(exist_ok=True)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    rows = [
        f"# What `make everything` saw at {head}",
        "",
        "| target | exit code | minutes | saw |",
    ]
    rows.append("| --- | ---: | ---: | --- |")
    failed = 0
    for target in sys.argv[1:] or TARGETS:
        log, started = RESULT.with_name(f"everything-{target}.log"), time.monotonic()
        print(f"make {target} > {log}", flush=True)
        with log.open("w") as output:
            code = subprocess.run(
                ["make", target], stdout=output, stderr=subprocess.STDOUT
            ).returncode
        failed += code != 0
        lines = [
            line
            for line in log.read_text(errors="replace").splitlines()
            if line.strip()
        ]
        seen = "; ".join(
            [line for line in lines if COUNTS.search(line)] or lines[-1:]
        ).replace("|", "/")
        rows.append(
            f"| {target} | {code} | {(time.monotonic() - started) / 60:.1f} | {seen[:160]} |"
        )
        print(rows[-1], flush=True)
        # after each, so that an interrupted run keeps what it saw
        RESULT.write_text("\n".join(rows) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

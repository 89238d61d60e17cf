"""Half an hour of one GPU, in the order of its worth, and what each step decides.

    python -m benchmarks.gpu.session                        # about 18 minutes on an H100
    python -m benchmarks.gpu.session --steps tests,gathered # only these; the others in the file stay
    python -m benchmarks.gpu.session --quick --output /tmp  # small sizes, on a CPU too: a dry run

Each step writes its rows as ``python -m benchmarks.gpu`` does, and then its rules with what was seen, so that nothing
that follows can lose them. A step whose rule fails may bring another one forward, or end the session.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from benchmarks.gpu import __main__ as gpu

Rows = dict[str, Any]
_RING_8K: Final = {"forward": 8.8e-3, "backward": 25.8e-3}


class Rule(NamedTuple):
    """Conditions on the results of rows, for the session to continue as planned."""

    says: str
    holds: Callable[[Rows], bool]
    otherwise: str
    then: str | None = None
    """The step that comes next if it fails; ``stop`` ends the session."""


class Step(NamedTuple):
    """Rows, the seconds that they may take, tests that come before them, and rules."""

    seconds: float
    rows: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()


def _device(rows: Rows, name: str, kind: str) -> float:
    return rows[name]["device_seconds"]["ring"][kind]


def _flash4_is_faster(rows: Rows) -> bool:
    both = [rows[f"kernels-causal-{tokens}k-128"]["seconds"] for tokens in (8, 32)]
    return all(
        1.05 * one["flash4"][kind] <= one["cudnn"][kind]
        for one in both
        for kind in ("forward", "backward")
    )


def _errors(rows: Rows) -> bool:
    found = {name: rows["kernel-errors"][name] for name in ("flash4", "cudnn")}
    if absent := [
        f"{name}: {one['why_not']}" for name, one in found.items() if "why_not" in one
    ]:
        raise KeyError("; ".join(absent))
    return all(
        mask.get("error") is None and max(mask.values()) <= 6e-3
        for one in found.values()
        for mask in one.values()
    )


def _changing(rows: Rows) -> bool:
    one = rows["gathered-documents-changing"]
    return all(one["new"][kind] <= 1.1 * one["again"][kind] for kind in one["new"])


def _late_ranks(rows: Rows) -> bool:
    names = "gathered-8k-rank3", "gathered-8k-rank7"
    first = rows["gathered-8k"]["efficiency"]
    return all(
        rows[name]["efficiency"][kind] >= 0.97 * first[kind]
        for name in names
        for kind in first
    )


STEPS: Final = {
    "tests": Step(
        120,
        tests=("tests/torch/test_gpu.py", "-k", "merge or mask"),
        rules=(Rule("merge, sum and any mask are right", lambda rows: True, "mend them first", "stop"),),
    ),
    "ring": Step(
        180,
        ("facts", "merge", "ring-8k", "ring-documents", "ring-documents-balanced", "ring-window"),
        rules=(
            Rule(
                "8K forward and backward keep the device busy for 8.0 and 23.5 ms, within a tenth",
                lambda rows: all(_device(rows, "ring-8k", kind) <= most for kind, most in _RING_8K.items()),
                "what the passes were expected to take is wrong",
            ),
            Rule(
                "documents keep the device busy for at most 1.0 ms forward",
                lambda rows: _device(rows, "ring-documents", "forward") <= 1e-3,
                "look at the profile first",
                "profile",
            ),
            Rule(
                "eight partials are merged at 2.2 TB/s",
                lambda rows: rows["merge"]["of_eight_bytes_per_second"] >= 2.2e12,
                "tune triton_merge before gathered passes are judged",
            ),
        ),
    ),
    "kernels": Step(
        240,
        (
            "kernel-errors", "kernels-causal-8k-128", "kernels-causal-32k-128", "kernels-documents-64k-128",
            "kernels-window-64k-128",
        ),
        rules=(
            Rule("flash4 is 1.05 times as fast as cudnn both ways", _flash4_is_faster, "cudnn stays first on Hopper"),
            Rule("errors of flash4 and cudnn are at most 6e-3", _errors, "leave out the kernel that is worse"),
        ),
    ),
    "gathered": Step(
        240,
        (
            "gathered-8k", "gathered-8k-rank3", "gathered-8k-rank7", "gathered-window", "gathered-documents",
            "gathered-documents-balanced", "gathered-documents-changing", "gathered-32k",
        ),
        rules=(
            Rule(
                "8K forward keeps the device busy for less than 7.3 ms",
                lambda rows: _device(rows, "gathered-8k", "forward") < 7.3e-3,
                "auto keeps to the ring at 8K",
            ),
            Rule("new documents take at most 1.1 times as long as repeated ones", _changing, "leave out cudnn"),
            Rule("ranks 3 and 7 are within 3% of rank 0", _late_ranks, "look at what their launches have more"),
        ),
    ),
    "profile": Step(120, ("profile-balanced", "documents-changing-cudnn")),
    "steps": Step(240, ("llama-8x4k", "llama-4x8k", "llama-8x16k")),
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Take step after step, each in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", default=",".join(STEPS), help="which, with commas, in this order"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, for a dry run"
    )
    parser.add_argument(
        "--output", type=Path, default=gpu.RESULTS, help="folder of the results"
    )
    parser.add_argument(
        "--budget", type=float, default=1500.0, help="seconds for all of it"
    )
    options = parser.parse_args(arguments)
    left = options.steps.split(",")
    if unknown := sorted(set(left) - set(STEPS)):
        raise SystemExit(
            f"--steps: no step is called {', '.join(unknown)}; choose from {', '.join(STEPS)}"
        )
    if not torch.cuda.is_available() and not options.quick:
        raise SystemExit("there is no CUDA device; --quick makes a dry run on the CPU")
    options.output.mkdir(parents=True, exist_ok=True)
    path, end = (
        options.output / ("quick-session.json" if options.quick else "session.json"),
        time.monotonic() + options.budget,
    )
    verdicts: dict[str, Any] = (
        json.loads(path.read_text())["verdicts"] if path.exists() else {}
    )
    while left and time.monotonic() < end:
        name = left.pop(0)
        verdicts[name], following = take(
            name, options.quick, options.output, end - time.monotonic()
        )
        path.write_text(json.dumps({"verdicts": verdicts}, indent=1) + "\n")
        for says, verdict in verdicts[name]["rules"].items():
            print(f"{name}: {says}: {verdict}", file=sys.stderr, flush=True)
        if following == "stop":
            break
        if following in left:
            left.remove(following)
            left.insert(0, following)


def take(
    name: str, quick: bool, output: Path, budget: float
) -> tuple[dict[str, Any], str | None]:
    """Take a step; return what its rules say, and the step that a failed one brings forward."""
    step, started = STEPS[name], time.monotonic()
    seconds = min(step.seconds, budget)
    rows = Rows()
    passed = (
        not step.tests or _run("pytest", "-q", "-x", *step.tests, seconds=seconds) == 0
    )
    if step.rows:
        kind = "quick-session" if quick else "session"
        wanted = [
            "--rows",
            ",".join(step.rows),
            "--budget",
            str(seconds),
            "--output",
            str(output),
            "--name",
            f"{kind}-{name}",
        ]
        _run("benchmarks.gpu", *wanted, *["--quick"] * quick, seconds=seconds + 60)
        for path in output.glob(f"*{kind}-*.json"):
            rows |= {
                row: found["result"]
                for row, found in json.loads(path.read_text())["rows"].items()
                if "result" in found
            }
    found: dict[str, str] = {}
    following = None
    for rule in step.rules:
        try:
            holds = passed and rule.holds(rows)
            found[rule.says] = "yes" if holds else f"no: {rule.otherwise}"
        except (
            KeyError
        ) as error:  # a row that is not there, or a kernel that does not serve
            holds, found[rule.says] = not step.tests, f"not measured: {error.args[0]}"
        if not holds:
            following = following or rule.then
    return {"seconds": time.monotonic() - started, "rules": found}, following


def _run(module: str, *arguments: str, seconds: float) -> int | None:
    """Return how a module ended, None if it took too long: what it has written stays."""
    command, root = (
        [sys.executable, "-m", module, *arguments],
        Path(__file__).parents[2],
    )
    try:
        return subprocess.run(
            command, cwd=root, check=False, timeout=seconds
        ).returncode
    except subprocess.TimeoutExpired:
        return None


if __name__ == "__main__":
    main()

"""Run the tests with given releases of torch and transformers, and keep which releases passed.

`python -m tests.versions` takes the newest of everything, `--torch 2.11.0 --transformers 5.17.0 --python 3.12` others;
what follows `--` are tests in place of the default folders. Each run is a row of
`benchmarks/results/versions.json`, of which `python -m benchmarks.tables` makes docs/reference/versions.md. `--check`
only compares that file with the package registry, and warns of releases that nobody has run.

uv installs the packages: it unpacks PyTorch's CUDA build (6 GB) in half a minute where pip takes a quarter of an hour,
and neither a constraint nor a cap in pip's settings holds back what is newest.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from datetime import date
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
RESULT: Final = ROOT / "benchmarks" / "results" / "versions.json"
FOLDER: Final = ROOT / ".venv-unpinned"
WATCHED: Final = ("torch", "transformers", "trl")
"""Packages of which a new minor release may move what ringspan needs."""

TOOLS: Final = (
    "pillow",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "setuptools",
)
# What FSDP2, models and trainers of a new release break first, then the rest that depends on them.
FOLDERS: Final = (
    "tests/torch/model/memory",
    "tests/torch/test_parallelize.py",
    "tests/torch/model/consistency",
    "tests/torch/engine/recurrence",
    "tests/torch/model",
    "tests/torch/generate",
    "tests/measure",
    "tests/hf",
    "tests/lightning",
)
SHOWN: Final = (
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "peft",
    "triton",
    "python",
)


def main() -> int:
    arguments = _arguments()
    if arguments.check:
        return check()
    python = environment(
        arguments.python,
        {"torch": arguments.torch, "transformers": arguments.transformers},
    )
    versions = _installed(python)
    print("  ".join(f"{name} {versions[name]}" for name in SHOWN), flush=True)
    if arguments.only_install:
        return 0
    row = run(python, versions, [*(arguments.tests or FOLDERS)])
    keep(row)
    print(
        f"{row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped; see {RESULT.relative_to(ROOT)}"
    )
    return int(row["failed"] > 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.versions",
        description="Run the tests with given releases, by default the newest, and keep which passed.",
        epilog="Example: python -m tests.versions --torch 2.14.1 --python 3.12 -- tests/torch/model/memory",
    )
    parser.add_argument(
        "--torch",
        help="a release, as 2.14.1; by default the newest, also beyond what is supported",
    )
    parser.add_argument("--transformers", help="a release, as 5.23.0")
    parser.add_argument(
        "--python",
        default=f"{sys.version_info[0]}.{sys.version_info[1]}",
        help="as 3.12",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="warn of releases in the registry that have no row",
    )
    parser.add_argument(
        "--only-install",
        action="store_true",
        help="make the environment and run no test",
    )
    parser.add_argument(
        "tests", nargs="*", help="tests to run, after --; `tests` is the whole suite"
    )
    return parser.parse_args()


def environment(python: str, pinned: dict[str, str | None]) -> Path:
    """Make or renew a virtual environment with the wanted releases; return its interpreter."""
    name = "-".join(
        [
            python,
            *(f"{package}{release}" for package, release in pinned.items() if release),
        ]
    )
    place = FOLDER / name / "bin" / "python"
    uv = FOLDER / "uv" / "bin" / "uv"
    if not uv.exists():
        subprocess.run([sys.executable, "-m", "venv", uv.parents[1]], check=True)
        subprocess.run(
            [uv.with_name("python"), "-m", "pip", "install", "-q", "uv"], check=True
        )
    settings = os.environ | {
        "UV_CACHE_DIR": str(FOLDER / "cache"),
        "UV_HTTP_TIMEOUT": "300",
    }
    if "PIP_INDEX_URL" in os.environ:
        settings["UV_DEFAULT_INDEX"] = os.environ["PIP_INDEX_URL"]
    if "PIP_CERT" in os.environ:
        settings["SSL_CERT_FILE"] = os.environ["PIP_CERT"]
    if not place.exists():
        subprocess.run(
            [uv, "venv", "-q", "--python", python, place.parents[1]],
            check=True,
            env=settings,
        )
    # An override takes the place of every bound, of ringspan's too: what is newest may lie beyond them.
    overrides = FOLDER / f"{name}.txt"
    exact = {package: f"=={release}" for package, release in pinned.items() if release}
    overrides.write_text(
        "".join(f"{package}{exact.get(package, '')}\n" for package in WATCHED),
        encoding="utf-8",
    )
    command = [
        uv,
        "pip",
        "install",
        "-q",
        "-U",
        "--python",
        place,
        "--overrides",
        overrides,
        "-e",
        ".[all]",
    ]
    extra = ["bitsandbytes", "triton; platform_system == 'Linux'", *TOOLS]
    subprocess.run([*command, *extra], check=True, env=settings, cwd=ROOT)
    return place


def _installed(python: Path) -> dict[str, str]:
    asked = f"""
import json, platform
from importlib.metadata import version
found = {{name: version(name) for name in {SHOWN[:-1]!r}}}
print(json.dumps(found | {{"python": platform.python_version()}}))
"""
    return json.loads(
        subprocess.run(
            [python, "-c", asked], check=True, capture_output=True, text=True
        ).stdout
    )


# What may share the machine by a process for each core, then what waits for processes by the clock.
STEPS: Final = {
    "not alone": ["--numprocesses=logical", "--maxprocesses=4", "--dist=loadgroup"],
    "alone": [],
}


def run(python: Path, versions: dict[str, str], tests: list[str]) -> dict[str, Any]:
    """Run tests in an environment; return their counts, the names that failed, and the releases."""
    name = (
        f"versions-{versions['torch']}-{versions['transformers']}-{versions['python']}"
    )
    found: list[dict[str, Any]] = []
    for number, (marked, workers) in enumerate(STEPS.items()):
        report = ROOT / "build" / f"{name}-{number}.xml"
        report.parent.mkdir(exist_ok=True)
        command = [
            python,
            "-m",
            "pytest",
            "-m",
            f"{marked} and not long and not seeded",
            f"--junitxml={report}",
        ]
        settings = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PATH": f"{python.parent}:{os.environ['PATH']}",
        }
        subprocess.run([*command, *workers, *tests], cwd=ROOT, env=settings)
        found.append(counts(report))
    total = {
        key: sum((each[key] for each in found), type(found[0][key])())
        for key in found[0]
    }
    return versions | {"date": date.today().isoformat(), "tests": tests} | total


def counts(report: Path) -> dict[str, Any]:
    """Return what a JUnit report counts, and the names of tests that failed."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, f"{report} has no suite"
    failed = [
        case
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped, total = int(suite.get("skipped", 0)), int(suite.get("tests", 0))
    return {
        "passed": total - skipped - len(failed),
        "failed": len(failed),
        "skipped": skipped,
        "failures": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
    }


def keep(row: dict[str, Any]) -> None:
    """Add a row to the table in place of an earlier one of the same releases and tests."""
    kept = (
        json.loads(RESULT.read_text(encoding="utf-8"))
        if RESULT.exists()
        else {"command": "make unpinned", "rows": []}
    )
    rows = [each for each in kept["rows"] if _identity(each) != _identity(row)]
    rows = sorted(
        [*rows, row],
        key=lambda each: [*map(_numbers, _identity(each)[:3]), each["tests"]],
        reverse=True,
    )
    RESULT.write_text(
        json.dumps(kept | {"rows": rows}, indent=1) + "\n", encoding="utf-8"
    )


def _identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["torch"], row["transformers"], row["python"], tuple(row["tests"])


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


def check() -> int:
    """Print a warning for each package whose newest minor release in the registry has no row; return 0."""
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
    for package in WATCHED:
        newest = _newest(package)
        if newest is None:
            print(f"warning: the registry was not asked for {package}")
        elif all(_numbers(row[package])[:2] != _numbers(newest)[:2] for row in rows):
            print(
                f"warning: {package} {newest} is in the registry and was never tried: run make unpinned"
            )
    return 0


def _newest(package: str) -> str | None:
    """Return a package's newest release in the registry, whatever pip's settings cap; None without an answer."""
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    try:
        asked = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"PIP_CONSTRAINT": os.devnull},
        )
    except subprocess.TimeoutExpired:
        return None
    found = re.match(rf"{package} \(([\d.]+)\)", asked.stdout)
    return found and found[1]


if __name__ == "__main__":
    sys.exit(main())

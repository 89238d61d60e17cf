"""What is in a wheel and in an sdist: ``python -m tests.package dist`` checks those of a folder."""

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problems(folder: Path) -> list[str]:
    """What is missing from the one wheel and the one sdist of a folder, and what should not be there."""
    (wheel,), (sdist,) = list(folder.glob("*.whl")), list(folder.glob("*.tar.gz"))
    return [*_of_wheel(wheel), *_of_sdist(sdist)]


def _of_wheel(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        metadata = next(
            archive.read(name).decode()
            for name in names
            if name.endswith(".dist-info/METADATA")
        )
    expected = {
        file.relative_to(ROOT / "src").as_posix()
        for file in _tracked("src")
        if file.is_file()
    }
    inside = {name for name in names if ".dist-info/" not in name}
    found = [f"the wheel lacks {name}" for name in sorted(expected - inside)]
    found += [f"the wheel has {name}" for name in sorted(inside - expected)]
    needed = (
        "Requires-Python: >=3.11",
        "License-Expression: Apache-2.0",
        "Provides-Extra: train",
        "# ringspan",
    )
    found += [
        f"the wheel's metadata lacks {line!r}"
        for line in needed
        if line not in metadata
    ]
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        found.append("the wheel lacks LICENSE")
    if not any(name.endswith(".dist-info/entry_points.txt") for name in names):
        found.append("the wheel has no command")
    return found


def _of_sdist(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        names = {
            member.name.partition("/")[2]
            for member in archive.getmembers()
            if member.isfile()
        }
    folders = ("src", "tests", "benchmarks", "docs", "examples", ".github")
    expected = {
        file.relative_to(ROOT).as_posix()
        for folder in folders
        for file in _tracked(folder)
    }
    expected |= {
        "pyproject.toml",
        "Makefile",
        "constraints.txt",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
    }
    found = [f"the sdist lacks {name}" for name in sorted(expected - names)]
    kept_out = (".venv", "build/", "dist/", "runs/", ".git/")
    return found + [
        f"the sdist has {name}" for name in sorted(names) if name.startswith(kept_out)
    ]


def _tracked(folder: str) -> list[Path]:
    """Files of a folder but for what Python leaves behind."""
    return [
        file
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    ]


if __name__ == "__main__":
    found = problems(Path(sys.argv[1]))
    print("\n".join(found) or "wheel and sdist have what they should")
    sys.exit(bool(found))

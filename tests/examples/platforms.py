"""Nodes of a platform that stand on this machine: their programs, and their environment."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]


def put_programs(place: Path, bodies: Mapping[str, str]) -> None:
    """Write scripts of bash by their names into ``place / "bin"``."""
    (place / "bin").mkdir()
    for name, body in bodies.items():
        program = place / "bin" / name
        program.write_text(f"#!/usr/bin/env bash\n{body}\n")
        program.chmod(0o755)


def environment(
    place: Path, more: Mapping[str, str], *, without: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return this process's environment with those programs first, without names that begin so."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not (without and name.startswith(without))
    }
    return {
        **kept,
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **more,
    }

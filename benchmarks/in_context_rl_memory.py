"""How many trajectories examples/in_context_rl trains on in so much memory of each process, alone and on a ring of two.

    python -m benchmarks.in_context_rl_memory grid 18
    python -m benchmarks.in_context_rl_memory point 13

Some steps on one sequence each, under ``--memory-mb``: Linux denies a process any more memory than it had mapped after
a step of one trajectory and so many MB. That counts all it maps, whatever it is for: activations, gradients, buffers of
messages, what the allocators keep. What came before is not in it: torch, weights, data.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from ringspan.measure.machine import describe_machine

ROOT: Final = Path(__file__).parents[1]
RESULT: Final = ROOT / "benchmarks" / "results" / "in-context-rl-memory-cpu.json"
TRIED: Final = {
    "grid": ((1, 64), (1, 128), (2, 128), (2, 256)),
    "point": ((1, 128), (2, 128)),
}
"""Processes, and trajectories in context."""
OPTIONS: Final = {"grid": {"steps": 3}, "point": {"steps": 200, "heads": 2}}
STEPS: Final = {"grid": 16, "point": 8}
"""Of a trajectory."""


def tried(world: str, ranks: int, trajectories: int, megabytes: int) -> dict[str, Any]:
    """A row: did it train, and the line that was printed if not."""
    tokens = STEPS[world] * trajectories
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "world": world,
            "trajectories": trajectories,
            "collected": trajectories,
            "tasks": 8,
            "seeds": 1,
            "tokens": tokens,
            "evaluated": 1,
            "attempts": 1,
            "memory-mb": megabytes,
            "output": folder,
            "result": f"{folder}/result.json",
            **OPTIONS[world],
        }
        script = [
            "examples/in_context_rl/compare.py",
            *(f"--{name}={value}" for name, value in options.items()),
        ]
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        ended = subprocess.run(
            [*launcher, *script], cwd=ROOT, capture_output=True, text=True, check=False
        )
    said = next(
        (line for line in ended.stderr.splitlines() if "takes more than" in line), ""
    )
    if ended.returncode and not said:
        raise RuntimeError(ended.stderr)
    return {
        "ranks": ranks,
        "trajectories": trajectories,
        "tokens": tokens,
        "trained": not ended.returncode,
        "said": said,
    }


def main(world: str, megabytes: int) -> None:
    """Write the result of a world beside that of the other."""
    rows = []
    for ranks, trajectories in TRIED[world]:
        rows.append(tried(world, ranks, trajectories, megabytes))
        print(rows[-1], flush=True)
    worlds = (
        json.loads(RESULT.read_text(encoding="utf-8"))["worlds"]
        if RESULT.is_file()
        else {}
    )
    worlds[world] = {
        "command": f"python -m benchmarks.in_context_rl_memory {world} {megabytes}",
        "machine": describe_machine(),
        "options": OPTIONS[world],
        "memory_mb": megabytes,
        "rows": rows,
    }
    RESULT.write_text(json.dumps({"worlds": worlds}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

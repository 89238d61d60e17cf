"""How many trajectories examples/in_context_rl trains on in so much memory of each process, alone and on a ring of two.

    python -m benchmarks.in_context_rl_memory 28

Three steps on one sequence in the dark room each, under ``--memory-mb``: Linux denies a process any more memory than it
had mapped after a step of one trajectory and so many MB. That counts all it maps, whatever it is for: activations,
gradients, buffers of messages, what the allocators keep. What came before is not in it: torch, weights, data.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from ringspan.measure.bench.machine import describe_machine

ROOT: Final = Path(__file__).parents[1]
RESULT: Final = ROOT / "benchmarks" / "results" / "in-context-rl-memory-cpu.json"
TRIED: Final = ((1, 64), (1, 128), (2, 128), (2, 256))
"""Processes, and trajectories in context."""


def tried(ranks: int, trajectories: int, megabytes: int) -> dict[str, Any]:
    """A row: did it train, and the line that was printed if not."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "world": "grid", "trajectories": trajectories, "collected": trajectories, "tasks": 8, "seeds": 1,
            "steps": 3, "evaluated": 1, "attempts": 1, "memory-mb": megabytes,
            "output": folder, "result": f"{folder}/result.json",
        }  # fmt: skip
        script = ["examples/in_context_rl/compare.py", *(f"--{name}={value}" for name, value in options.items())]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        ended = subprocess.run([*launcher, *script], cwd=ROOT, capture_output=True, text=True, check=False)
    said = next((line for line in ended.stderr.splitlines() if "takes more than" in line), "")
    if ended.returncode and not said:
        raise RuntimeError(ended.stderr)
    return {
        "ranks": ranks, "trajectories": trajectories, "tokens": 16 * trajectories, "trained": not ended.returncode,
        "said": said,
    }  # fmt: skip


def main(megabytes: int) -> None:
    """Write the result."""
    rows = []
    for ranks, trajectories in TRIED:
        rows.append(tried(ranks, trajectories, megabytes))
        print(rows[-1], flush=True)
    facts = {
        "command": f"python -m benchmarks.in_context_rl_memory {megabytes}",
        "machine": describe_machine(),
        "memory_mb": megabytes,
        "rows": rows,
    }
    RESULT.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]))

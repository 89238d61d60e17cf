"""Examples as users start them: in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_ACCELERATE: Final = (
    "accelerate.commands.launch",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
)
LAUNCHERS: Final = {
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    # As on a machine with two GPUs, which it does not look for.
    "accelerate": (
        *_ACCELERATE,
        "--multi_gpu",
        "--num_processes=2",
        "--num_machines=1",
        "--main_process_port=0",
    ),
    "accelerate, one process": (*_ACCELERATE, "--cpu"),
}


def launched(launcher: str, name: str, folder: Path, *options: str) -> str:
    """What an example prints, started in a folder by one of the launchers."""
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            *LAUNCHERS[launcher],
            str(ROOT / "examples" / f"{name}.py"),
            *options,
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,  # pytest has a shorter one of its own, but for `make long`
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout

"""Examples as users start them: in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
TORCHRUN: Final = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# On CPUs accelerate starts one process; on GPUs it is torchrun.
ACCELERATE: Final = ("accelerate.commands.launch", "--cpu", "--mixed_precision", "no", "--dynamo_backend", "no")


def launched(launcher: tuple[str, ...], name: str, folder: Path, *options: str) -> str:
    """What an example prints, started in a folder."""
    run = subprocess.run(
        [sys.executable, "-m", *launcher, str(ROOT / "examples" / f"{name}.py"), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,  # pytest has a shorter one of its own, but for `make long`
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout

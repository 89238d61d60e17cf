"""Each example runs, in short form, on the ranks that its first lines name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "needs", "written"),
    [
        ("lora", "peft", "adapter_config.json"),
        ("lightning_trainer", "lightning", "model/config.json"),
    ],
)
def test_an_example_learns_what_it_says(tmp_path, name, needs, written):
    pytest.importorskip(needs)
    file = ROOT / "examples" / f"{name}.py"
    assert f"torchrun --nproc-per-node 2 examples/{name}.py" in file.read_text(encoding="utf-8")
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)),
            *("--steps", "30", "--length", "96", "--output", str(tmp_path / "out")),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = re.search(r"loss (\S+) -> (\S+);", run.stdout)
    assert found is not None and float(found[2]) < float(found[1]) - 0.2, run.stdout
    assert (tmp_path / "out" / written).is_file()
    if name == "lora":  # the last sequence, by PEFT on one process
        assert float(run.stdout.split(": ")[-1].split()[0]) == pytest.approx(float(found[2]), abs=0.3)

"""``benchmarks/weights.py`` on a small model: every figure is measured, and what is saved is what was read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_small_model_goes_from_files_to_shards_and_back(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "weights.py"), str(tmp_path / "model")]
    options = ["--size", "tiny", "--ranks", "2", "--replicate", "2", "--result", str(tmp_path / "result.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *options], env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    weights = 2 * result["parameters"]
    assert result["saved_bit_for_bit"] is True
    assert result["shard_bytes"] >= 2 * weights - 10_000  # of both replicas; files have headers
    assert 5 < result["loss"] < 8
    assert result["load_read_bytes_of_further_replicas"] <= result["load_read_bytes"]
    assert set(result["anonymous_bytes"]) == {
        "before, all ranks",
        *(f"{stage}, beyond that" for stage in ("load", "save", "step")),
        "load, transformers on one process, beyond its own",
    }
    assert result["anonymous_bytes"]["before, all ranks"] > 50e6, "two processes with PyTorch"
    for name in ("load_seconds", "load_seconds_transformers", "save_seconds", "step_seconds"):
        assert 0 < result[name] < 100, name

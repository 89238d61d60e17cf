"""The Ray Train example against the plain program: the same losses, also after a worker was killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs ray[train]")

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"
CONFIG = """
run = "run"
steps = 30
[model]
init = "scratch"
tokenizer = "train"
[model.config]
model_type = "llama"
vocab_size = 300
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 64
[data]
paths = "text"
sequence_length_tokens = 45
[optimizer]
warmup_steps = 1
[checkpoints]
every_steps = 2
"""


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for number in range(8):
        words = (f"chapter {number} line {line} says {line * number % 17}\n" for line in range(40))
        (tmp_path / "text" / f"{number}.txt").write_text("".join(words))
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def workers(folder: Path) -> list[int]:
    """Processes of Ray's workers that train in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"RayTrainWorker" in (process / "cmdline").read_bytes() and (process / "cwd").resolve() == folder:
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds workers in /proc")
def test_a_killed_worker_changes_no_loss(workplace: Path):
    plain = [sys.executable, "-m", "ringspan", "train", "config.toml", "--nproc", "2", "run=plain"]
    subprocess.run(plain, cwd=workplace, check=True, capture_output=True, timeout=120)
    command = [sys.executable, str(EXAMPLE), "config.toml", "--workers", "2", "--max-failures", "1"]
    with subprocess.Popen(command, cwd=workplace, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        metrics, deadline = workplace / "run" / "metrics.jsonl", time.monotonic() + 120
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 5:
            assert job.poll() is None and time.monotonic() < deadline, "it does not train"
            time.sleep(0.02)
        victims = workers(workplace)
        assert len(victims) == 2
        os.kill(victims[-1], signal.SIGKILL)
        assert job.wait(timeout=200) == 0
    assert list((workplace / "run" / "watchdog").iterdir()), "the other worker noticed"
    assert losses(workplace / "run") == losses(workplace / "plain")


def test_what_workers_would_refuse_is_refused_before_they_start(workplace: Path):
    command = [sys.executable, str(EXAMPLE), "config.toml", "--workers", "2", "mesh.ring=3"]
    done = subprocess.run(command, cwd=workplace, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "mesh.ring = 3" in done.stderr.splitlines()[-1]
    assert not (workplace / "run").exists()

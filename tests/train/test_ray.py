"""The Ray Train example against the plain program: the same losses, also after a worker was killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.runs import metrics, training_file, write_text

pytest.importorskip("ray", reason="needs ray[train]")

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    write_text(tmp_path, files=8)
    (tmp_path / "config.toml").write_text(
        training_file(tmp_path, steps=30) + "[checkpoints]\nevery_steps = 2\n"
    )
    return tmp_path


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(run) if "loss" in line}


def workers(folder: Path) -> list[int]:
    """Processes of Ray's workers that train in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (
                b"RayTrainWorker" in (process / "cmdline").read_bytes()
                and (process / "cwd").resolve() == folder
            ):
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="finds workers in /proc"
)
def test_a_killed_worker_changes_no_loss(workplace: Path):
    plain = [
        sys.executable,
        "-m",
        "ringspan",
        "train",
        "config.toml",
        "--nproc",
        "2",
        "run=plain",
    ]
    subprocess.run(plain, cwd=workplace, check=True, capture_output=True, timeout=120)
    command = [
        sys.executable,
        str(EXAMPLE),
        "config.toml",
        "--workers",
        "2",
        "--max-failures",
        "1",
    ]
    with subprocess.Popen(
        command, cwd=workplace, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as job:
        written, deadline = workplace / "run" / "metrics.jsonl", time.monotonic() + 120
        while not written.exists() or len(written.read_text().splitlines()) < 5:
            assert job.poll() is None and time.monotonic() < deadline, (
                "it does not train"
            )
            time.sleep(0.02)
        victims = workers(workplace)
        assert len(victims) == 2
        os.kill(victims[-1], signal.SIGKILL)
        assert job.wait(timeout=200) == 0
    assert list((workplace / "run" / "watchdog").iterdir()), "the other worker noticed"
    assert losses(workplace / "run") == losses(workplace / "plain")


def test_what_workers_would_refuse_is_refused_before_they_start(workplace: Path):
    command = [
        sys.executable,
        str(EXAMPLE),
        "config.toml",
        "--workers",
        "2",
        "mesh.ring=3",
    ]
    done = subprocess.run(
        command, cwd=workplace, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "mesh.ring = 3" in done.stderr.splitlines()[-1]
    assert not (workplace / "run").exists()

"""Each example runs, in short form, on the ranks that its first lines name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def ran(name: str, folder: Path, *options: str) -> str:
    file = ROOT / "examples" / f"{name}.py"
    assert f"torchrun --nproc-per-node 2 examples/{name}.py" in file.read_text(
        encoding="utf-8"
    )
    run = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                str(file),
            ),
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
        timeout=110,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def test_a_question_after_a_video_is_about_an_early_frame(tmp_path):
    out = ran(
        "video/moving_shapes",
        tmp_path,
        "--output",
        str(tmp_path / "out"),
        "--frames",
        "8",
        "--steps",
        "45",
    )
    found = re.search(
        r"loss (\S+) -> (\S+); (\d+)% of 64 new videos .* within (\S+) of one process",
        out,
    )
    assert found is not None, out
    assert float(found[2]) < 1.0 < float(found[1]) and int(found[3]) >= 60, (
        "of four colours"
    )
    assert float(found[4]) < 1e-5
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_diffusion_transformer_has_one_process_gradients(tmp_path):
    pytest.importorskip("diffusers")
    found = re.search(
        r"loss (\S+) -> (\S+); gradients within (\S+) of",
        ran("diffusion", tmp_path, "--steps", "20"),
    )
    assert (
        found is not None
        and float(found[2]) < float(found[1])
        and float(found[3]) < 1e-5
    )


@pytest.mark.parametrize(
    ("name", "needs", "written"),
    [
        ("lora", "peft", "adapter_config.json"),
        ("lightning_trainer", "lightning", "model/config.json"),
    ],
)
def test_an_example_learns_what_it_says(tmp_path, name, needs, written):
    pytest.importorskip(needs)
    out = ran(
        name,
        tmp_path,
        "--steps",
        "30",
        "--length",
        "96",
        "--output",
        str(tmp_path / "out"),
    )
    found = re.search(r"loss (\S+) -> (\S+);", out)
    assert found is not None and float(found[2]) < float(found[1]) - 0.2, out
    assert (tmp_path / "out" / written).is_file()
    if name == "lora":  # the last sequence, by PEFT on one process
        assert float(out.split(": ")[-1].split()[0]) == pytest.approx(
            float(found[2]), abs=0.3
        )

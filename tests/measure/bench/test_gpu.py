"""The one script for a machine with a GPU, in its dry run: each row is kept, and a failure loses nothing else."""

import json
import subprocess
import sys

import pytest

from benchmarks import gpu


def test_a_dry_run_keeps_every_row_that_was_asked_for(tmp_path):
    gpu.main(["--quick", "--rows", "ring-documents", "--output", str(tmp_path)])
    gpu.main(["--quick", "--rows", "llama-ring-4", "--output", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert found["machine"]["torch"] and list(found["rows"]) == ["ring-documents", "llama-ring-4"]
    assert all(row["result"] and row["seconds"] > 0 for row in found["rows"].values())
    assert found["rows"]["llama-ring-4"]["result"]["tokens_per_second_per_rank"] > 0
    efficiency = found["rows"]["ring-documents"]["result"]["efficiency"]["forward"]
    assert found["summary"]["ring-documents forward"] == {"measured": efficiency, "at_least": 0.92}


@pytest.mark.parametrize(
    ("code", "reason"),
    [("raise SystemExit('no memory')", "no memory"), ("print('no json')", "JSONDecodeError"), ("", "IndexError")],
)
def test_a_row_that_fails_says_why(code, reason):
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert reason in gpu._finish(process, 60)["error"]


def test_a_row_that_takes_too_long_is_ended():
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert "longer than 0 s" in gpu._finish(process, 0.2)["error"]
    assert process.wait(10) and "time was over" in gpu._finish(None, 1)["error"]


def test_it_refuses_politely(tmp_path):
    with pytest.raises(SystemExit, match="no row is called abacus"):
        gpu.main(["--quick", "--rows", "abacus", "--output", str(tmp_path)])
    if not gpu.torch.cuda.is_available():
        with pytest.raises(SystemExit, match="there is no CUDA device"):
            gpu.main(["--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_documents_fill_the_sequence_around_their_mean():
    lengths = [int(length) for length in gpu._documents(65536, 2048).removeprefix("documents:").split(",")]
    assert sum(lengths) == 65536 and 1800 < sum(lengths) / len(lengths) < 2300 and min(lengths) > 0

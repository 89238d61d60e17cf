"""A rank that is killed while weights are read or written: the other one names it, and no half is taken for a model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringspan.core.errors import EXIT_PEER_LOST
from tests.every_model.tiny import tiny_model
from tests.every_model.weights import SMALL_FILES, differences, stored, written

pytestmark = pytest.mark.alone

JOB = """
import os, sys
from datetime import timedelta
import torch.distributed as dist
import ringspan as rs
from ringspan.torch.weights import files, saving

what, victim, given, saved, size = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
dist.init_process_group("gloo", timeout=timedelta(seconds=600))
rank, mesh = dist.get_rank(), rs.init_mesh(ring=2)

def dies_after(kind, number):
    read, left = kind.read, [number]
    def dying(self, region):
        left[0] -= 1
        if left[0] == 0:
            os._exit(3)
        return read(self, region)
    if rank == victim:
        kind.read = dying

if what == "load":
    dies_after(files._Stored, 30)  # some of which are for trials
model = rs.from_pretrained(given, mesh)
if what == "save":
    dies_after(saving._Shards, 9)
model.save_pretrained(saved, max_shard_size=size)
"""


def run(tmp_path: Path, what: str, victim: int) -> tuple[list[int], list[str]]:
    """Exit code and standard error of both ranks."""
    port, processes = 29_500 + os.getpid() % 2000, []
    for rank in range(2):
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        folders = [str(tmp_path / "given"), str(tmp_path / "saved")]
        command = [sys.executable, "-c", JOB, what, str(victim), *folders, SMALL_FILES]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=200)[1] for process in processes]
    return [process.returncode for process in processes], errors


@pytest.mark.parametrize(
    ("what", "victim", "doing"),
    [("load", 1, "loading the (model|weights)"), ("save", 1, "saving the model"), ("save", 0, "saving the model")],
)
def test_a_rank_that_dies_is_named_and_what_was_there_stays(tmp_path: Path, what: str, victim: int, doing: str):
    written("llama", tmp_path / "given")
    tiny_model("qwen2").save_pretrained(tmp_path / "saved")
    before = stored(tmp_path / "saved")
    codes, errors = run(tmp_path, what, victim)
    other = 1 - victim
    assert codes[victim] == 3 and codes[other] == EXIT_PEER_LOST, errors
    assert re.search(rf"rank {victim} died at step 0.* \({doing}\)", errors[other]), errors[other]
    assert not differences(stored(tmp_path / "saved"), before)
    assert not list((tmp_path / "saved").glob("*.index.json"))

"""A loop of the user's own in which a rank does not come: each process ends with its name, and does not hang."""

import os
import re
import subprocess
import sys
import time

import pytest

from ringspan.core.errors import EXIT_PEER_LOST, EXIT_STALLED

pytestmark = pytest.mark.alone

LOOP = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import ringspan as rs
from tests.torch.models import build, tokens

what, seconds = sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
rank, mesh = dist.get_rank(), rs.init_mesh(ring=2)
model = rs.parallelize(build("llama"), mesh, watchdog=what != "opt-out")
ids = tokens(1, 16)
batch = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)
for step in range(2):
    loss = model(**batch).loss
    loss.backward()
match what:
    case "rank 0 saves alone at the end":
        if rank == 0:
            model.save_pretrained(sys.argv[3])
    case "rank 1 leaves the loop" | "opt-out":
        if rank == 0:
            model(**batch)
    case "rank 1 stays outside":
        if rank == 0:
            model(**batch)
        time.sleep(60)
    case "rank 1 skips backward":
        loss = model(**batch).loss
        if rank == 0:
            loss.backward()
        time.sleep(60)
    case "rank 1 dies":
        if rank == 1:
            os._exit(3)
        model(**batch)
    case "rank 1 fails":
        if rank == 1:
            raise KeyError("no such column")
        model(**batch)
    case "nothing":
        time.sleep(3 * rank)  # one after the other is no reason to complain
"""


def run(tmp_path, what: str, seconds: float = 60) -> tuple[list[int], list[str], float]:
    """Exit code and standard error of both ranks, and how long they took from the loop's end on."""
    port = 29_500 + os.getpid() % 2000
    processes = []
    started = time.monotonic()
    for rank in range(2):
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", LOOP, what, str(seconds), str(tmp_path / "model")]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=100)[1] for process in processes]
    return [process.returncode for process in processes], errors, time.monotonic() - started


@pytest.mark.parametrize(
    ("what", "code", "message"),
    [
        (
            "rank 0 saves alone at the end",
            EXIT_PEER_LOST,
            r"rank 1 ended at step 2.* \(outside of ringspan\), which others wait for at step",
        ),
        (
            "rank 1 leaves the loop",
            EXIT_PEER_LOST,
            r"rank 1 ended at step 2.* \(outside of ringspan\), which others wait for at step",
        ),
        ("rank 1 dies", EXIT_PEER_LOST, "rank 1 died at step "),
        ("rank 1 fails", EXIT_PEER_LOST, "rank 1 failed with KeyError: 'no such column'"),
    ],
)
def test_a_rank_that_is_gone_is_named_at_once(tmp_path, what, code, message):
    codes, errors, seconds = run(tmp_path, what, 600)
    assert re.search(message, errors[0]) and codes[0] == code
    assert seconds < 90


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("rank 1 stays outside", r"rank 1 at step 2.* \(outside of ringspan\) \(furthest behind\)"),
        ("rank 1 skips backward", r"rank 1 at step 3.* \(outside of ringspan\) \(furthest behind\)"),
    ],
)
def test_a_rank_that_stays_away_is_named_within_the_time_out(tmp_path, what, message):
    codes, errors, seconds = run(tmp_path, what, 6)
    assert codes == [EXIT_STALLED, EXIT_STALLED]
    assert all(re.search(message, error) for error in errors)
    assert seconds < 90


def test_a_loop_may_take_its_time_between_calls_and_ranks_may_end_one_after_the_other(tmp_path):
    codes, errors, _ = run(tmp_path, "nothing", 2)
    assert codes == [0, 0] and not any("ringspan:" in error for error in errors)


def test_the_watchdog_may_be_left_out(tmp_path):
    codes, errors, _ = run(tmp_path, "opt-out", 20)
    assert codes[0] == 1 and codes[1] == 0 and "ringspan:" not in errors[0]

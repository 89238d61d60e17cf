"""The ring over NCCL, with two ranks on one GPU: exchange on streams, handshake, watchdog, kill and resume.

    NCCL_MULTI_RANK_GPU_ENABLE=1 LD_PRELOAD=libnccl.so.2 pytest tests/torch/test_two_ranks_on_one_gpu.py

with the library of NCCL 2.30 or newer, where PyTorch's own is older.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ringspan.core.errors import EXIT_PEER_LOST
from tests.faults.job import Job
from tests.torch.on_one_gpu import MASKS, ROUTES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ,
        reason="no NCCL that lets ranks share a GPU, see above",
    ),
]


def start(command: list[str]) -> list[subprocess.Popen[str]]:
    """Two ranks of a command, on the first GPU both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank)},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def finish(
    processes: list[subprocess.Popen[str]], seconds: float = 100
) -> list[tuple[int, str, str]]:
    end = time.monotonic() + seconds
    try:
        found = [
            process.communicate(timeout=max(1.0, end - time.monotonic()))
            for process in processes
        ]
    finally:
        for process in processes:
            process.kill()
    return [
        (process.returncode, *texts)
        for process, texts in zip(processes, found, strict=True)
    ]


def results(check: str) -> list[Any]:
    ended = finish(start([sys.executable, "-m", "tests.torch.on_one_gpu", check]))
    assert [code for code, _, _ in ended] == [0, 0], "\n".join(
        errors[-3000:] for _, _, errors in ended
    )
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ended]


def test_attention_is_exact_and_the_same_every_time():
    for found in results("attention"):
        assert len(found) == len(MASKS) * len(ROUTES)
        for name, one in found.items():
            assert max(one["errors"]) < 6e-3 and not any(one["apart"]), (name, one)


def test_training_is_that_of_one_rank():
    first, second = results("training")
    assert first == second
    for name in ("ring", "offload", "full", "ulysses"):
        for ours, expected in zip(first[name], first["one"], strict=True):
            assert ours == pytest.approx(expected, rel=1e-5), name


def test_ranks_that_were_asked_for_different_things_are_told():
    for found in results("handshake"):
        assert "mask" in found["error"]


def test_the_watchdog_ends_a_rank_whose_peer_has_died():
    started = time.monotonic()
    (code, _, errors), (died, _, _) = finish(
        start([sys.executable, "-m", "tests.torch.on_one_gpu", "watchdog"])
    )
    assert died == 9 and code == EXIT_PEER_LOST and "rank 1" in errors, errors[-3000:]
    assert time.monotonic() - started < 80


def trained(job: Job) -> list[subprocess.Popen[str]]:
    return start([sys.executable, "-m", "ringspan", "train", str(job.config)])


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path):
    # Kernels are compiled in the first step.
    whole, struck = (
        Job(tmp_path, name, steps=12, every_steps=4, min_seconds=60)
        for name in ("whole", "struck")
    )
    ended = finish(trained(whole))
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2][-3000:]
    processes = trained(struck)
    while not struck.newest() and processes[0].poll() is None:
        time.sleep(0.02)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    finish(processes)
    ended = finish(trained(struck))
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2][-3000:]
    expected, found = whole.curve(), struck.curve()
    assert list(found) == list(expected)
    for step, (loss, norm) in found.items():
        assert (loss, norm) == pytest.approx(expected[step], rel=1e-5), step

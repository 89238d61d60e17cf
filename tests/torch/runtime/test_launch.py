"""Starting ranks: results in order, refusals and failures as one exception, and an end when told to stop."""

import logging
import multiprocessing
import os
import platform
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ringspan as rs
from ringspan.core.errors import EXIT_PEER_LOST, OutputError, RankLost
from ringspan.torch.model.consistency.watchdog import Watchdog
from ringspan.torch.runtime import launch as launcher
from ringspan.torch.runtime.forks import ABORT_AFTER_SECONDS
from ringspan.torch.runtime.launch import _LOGGERS, join, launch
from ringspan.train.config.tables import WatchdogConfig
from tests.faults.job import is_running


def rank_times(factor):
    dist.barrier()  # a rank that ends while another one still connects makes that one fail
    return dist.get_rank() * factor


def refuse_on_the_last():
    if dist.get_rank() == dist.get_world_size() - 1:
        raise rs.ConfigError("this value will not do")
    dist.barrier()


def fail_on_the_first():
    if dist.get_rank() == 0:
        raise ZeroDivisionError
    dist.barrier()


def write_on_the_first(said):
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    with Watchdog(WatchdogConfig(), None):
        if dist.get_rank() == 0:
            Path("/dev/full").write_text("too much")
        dist.barrier()


def kill_the_last():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def kill_the_last_unseen():
    """The launcher has no time to look, and finds both ranks ended."""
    if dist.get_rank() == 1:
        pid = multiprocessing.parent_process().pid
        subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep 1; kill -CONT {pid}"])
        time.sleep(0.3)
    kill_the_last()


def end_the_last():
    os._exit(5) if dist.get_rank() == 1 else time.sleep(60)


def test_results_come_by_rank():
    assert launch(rank_times, 2, 5) == [0, 5]


def parent():
    dist.barrier()
    return os.getppid()


@pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(),
    reason="ranks are no forks here",
)
def test_ranks_are_forks_of_one_process():
    [one] = {*launch(parent, 2), *launch(parent, 2)}
    assert one not in (os.getpid(), os.getppid())


def resident_bytes_after_freeing():
    """Tensors of two megabytes, freed but for small ones between them: what is still there of 200."""

    def resident():
        return 4096 * int(Path("/proc/self/statm").read_text().split()[1])

    before, tensors = resident(), []
    torch.ones(1 << 22)  # freed: from now on glibc keeps tensors of this size
    for _ in range(100):
        # which no hole of the heap that is there takes
        tensors += [
            torch.ones(1 << 19),
            torch.ones(1 << 15),
        ]
    del tensors[::2]
    return os.environ.get("GLIBC_TUNABLES"), resident() - before


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="another malloc than glibc's"
)
def test_thrifty_ranks_give_memory_back(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    [(_, kept)] = launch(resident_bytes_after_freeing, 1)
    [(tunables, left)] = launch(resident_bytes_after_freeing, 1, is_thrifty=True)
    assert "mmap_threshold" in tunables and "GLIBC_TUNABLES" not in os.environ
    assert left < 40 << 20 < 150 << 20 < kept
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=7")
    with launcher._environment(launcher._THRIFT):
        assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.tcache_count=7"


@pytest.mark.parametrize(
    ("function", "raised", "message", "traceback"),
    [
        (refuse_on_the_last, rs.ConfigError, "this value will not do", False),
        (fail_on_the_first, RuntimeError, "rank 0 failed", True),
        (kill_the_last, RankLost, "rank 1 failed: killed by SIGKILL", False),
        (kill_the_last_unseen, RankLost, "rank 1 failed: killed by SIGKILL", False),
        (
            end_the_last,
            RuntimeError,
            r"rank 1 failed \(exit code 5\): see its output",
            False,
        ),
    ],
)
def test_a_failure_names_its_rank_and_logs_its_traceback(
    caplog, monkeypatch, function, raised, message, traceback
):
    for name in _LOGGERS:
        monkeypatch.setattr(logging.getLogger(name), "handlers", [caplog.handler])
    with pytest.raises(raised, match=message) as caught:
        launch(function, 2)
    assert raised is not RankLost or caught.value.code == EXIT_PEER_LOST
    logged = [record for record in caplog.records if record.name in _LOGGERS]
    assert all(record.exc_info for record in logged) and bool(logged) is traceback
    assert not any(logging.getLogger(name).filters for name in _LOGGERS)


def test_an_unwritable_output_is_reported_by_the_launcher_only(tmp_path):
    with pytest.raises(OutputError, match="No space left on device; make room"):
        launch(write_on_the_first, 2, str(tmp_path / "said"))
    assert (tmp_path / "said").read_text() == ""


def test_no_ranks_and_ranks_that_could_not_meet_are_refused():
    with pytest.raises(rs.ConfigError, match="0 ranks: at least 1"):
        launch(rank_times, 0, 5)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(
            rs.ConfigError, match="ulimit -f allows files of 1024 bytes"
        ):
            launch(rank_times, 2, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def say_asleep():
    # at once: print writes the end of the line by itself
    os.write(1, f"asleep {os.getpid()}\n".encode())


def sleep_long():
    say_asleep()
    time.sleep(60)


def end_when_told():
    told = []
    signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    say_asleep()
    deadline = time.monotonic() + 30
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(told)


def never_end():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sleep_long()


# What is launched in turn, and what happens to each is below. Those that forward signals come last: a launcher that
# has its answer ignores signals from then on.
LAUNCHES = """
import os, signal
from tests.torch.runtime import test_launch as ranks
if __name__ == "__main__":
    for function, options in (
        (ranks.sleep_long, {}),
        (ranks.sleep_long, {}),
        (ranks.sleep_long, {"forward_signals": True}),
        (ranks.end_when_told, {"forward_signals": True}),
        (ranks.never_end, {"forward_signals": True, "max_restarts": 1}),
        (ranks.sleep_long, {}),
    ):
        try: print(ranks.launch(function, 2, **options), flush=True)
        except KeyboardInterrupt: print("interrupted", flush=True)
        os.kill(os.getpid(), signal.SIGTERM) if options else None
"""


def test_a_launcher_told_to_end_ends_its_ranks(tmp_path):
    """One launcher after the other in one process, each with two ranks, and a signal to all of its process group."""
    with open(tmp_path / "errors", "wb") as errors:
        command = [sys.executable, "-c", LAUNCHES]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )

    def started() -> list[int]:
        return [
            int(process.stdout.readline().removeprefix("asleep ")) for _ in range(2)
        ]

    def answer(pids: list[int]) -> str:
        said = process.stdout.readline()
        assert within(60, lambda: not any(map(is_running, pids)))
        return said

    try:
        for strike, number in (
            (os.killpg, signal.SIGINT),
            (os.kill, signal.SIGHUP),
            (os.killpg, signal.SIGINT),
        ):
            pids = started()
            strike(process.pid, number)
            assert answer(pids) == "interrupted\n"
        pids = started()
        os.killpg(process.pid, signal.SIGUSR1)
        assert answer(pids) == "[True, True]\n", "ranks end by themselves"
        pids = started()
        for _ in range(2):  # one that comes twice is one
            os.killpg(process.pid, signal.SIGINT)
        time.sleep(ABORT_AFTER_SECONDS + 0.1)
        assert all(map(is_running, pids))
        # a launcher that heard the first one late takes this for the same
        while any(map(is_running, pids)):
            os.killpg(process.pid, signal.SIGINT)
            within(1, lambda: not any(map(is_running, pids)))
        assert answer(pids) == "interrupted\n", (
            "a second interrupt aborts ranks that do not end"
        )
        started()
        assert (tmp_path / "errors").read_text() == ""
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
        assert within(60, lambda: not any(map(is_running, members(process.pid))))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def members(process_group: int) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getpgid(int(process.name)) == process_group:
                found.append(int(process.name))
    return found


def test_a_rank_that_waits_for_one_that_never_comes_says_so(monkeypatch, capfd):
    monkeypatch.setattr(launcher, "_WAIT_SECONDS", 0.2)

    def meet(*_, **__):
        [
            timer.join()
            for timer in threading.enumerate()
            if isinstance(timer, threading.Timer)
        ]

    monkeypatch.setattr(dist, "init_process_group", meet)
    for name, value in (
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "9"),
    ):
        monkeypatch.setenv(name, value)
    join()
    assert (
        "rank 1 has waited 0 s at 127.0.0.1:9 for all 2 ranks of this job; start"
        in capfd.readouterr().err
    )

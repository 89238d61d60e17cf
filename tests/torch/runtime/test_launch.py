"""Starting ranks: results in order, refusals and failures as one exception, and an end when told to stop."""

import logging
import os
import platform
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ringspan as rs
from ringspan.core.errors import EXIT_PEER_LOST, OutputError, RankLost
from ringspan.torch.consistency.watchdog import Watchdog
from ringspan.torch.runtime import launch as launcher
from ringspan.torch.runtime.forks import ABORT_AFTER_SECONDS
from ringspan.torch.runtime.launch import _LOGGERS, join, launch
from ringspan.train.config.tables import WatchdogConfig
from tests.faults.job import is_running

pytestmark = pytest.mark.alone


def rank_times(factor):
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


def test_a_killed_rank_is_named_and_not_the_ones_that_missed_it():
    with pytest.raises(RankLost, match="rank 1 failed: killed by SIGKILL") as raised:
        launch(kill_the_last, 2)
    assert raised.value.code == EXIT_PEER_LOST


def test_results_come_by_rank():
    assert launch(rank_times, 2, 5) == [0, 5]


def parent():
    return os.getppid()


@pytest.mark.skipif(sys.platform != "linux" or torch.cuda.is_available(), reason="ranks are no forks here")
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
        tensors += [torch.ones(1 << 19), torch.ones(1 << 15)]  # which no hole of the heap that is there takes
    del tensors[::2]
    return os.environ.get("GLIBC_TUNABLES"), resident() - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc than glibc's")
def test_thrifty_ranks_give_memory_back(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    [(_, kept)] = launch(resident_bytes_after_freeing, 1)
    [(tunables, left)] = launch(resident_bytes_after_freeing, 1, is_thrifty=True)
    assert "mmap_threshold" in tunables and "GLIBC_TUNABLES" not in os.environ
    assert left < 40 << 20 < 150 << 20 < kept
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=7")
    [(tunables, _)] = launch(resident_bytes_after_freeing, 1, is_thrifty=True)
    assert tunables == "glibc.malloc.tcache_count=7"


def test_what_one_rank_refuses_is_raised_with_its_own_type():
    with pytest.raises(rs.ConfigError, match="this value will not do"):
        launch(refuse_on_the_last, 2)


def test_another_failure_names_the_rank():
    with pytest.raises(RuntimeError, match="rank 0 failed"):
        launch(fail_on_the_first, 2)


@pytest.mark.parametrize(
    ("function", "raised", "traceback"),
    [(refuse_on_the_last, rs.ConfigError, False), (fail_on_the_first, RuntimeError, True)],
)
def test_a_traceback_is_logged_of_a_failure_and_nothing_of_what_is_refused(caplog, function, raised, traceback):
    for name in _LOGGERS:
        logging.getLogger(name).addHandler(caplog.handler)
    try:
        with pytest.raises(raised):
            launch(function, 2)
    finally:
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(caplog.handler)
    logged = [record for record in caplog.records if record.name in _LOGGERS]
    assert any(record.exc_info for record in logged) is bool(logged) is traceback
    assert not any(logging.getLogger(name).filters for name in _LOGGERS)


def test_no_rank_says_what_the_launcher_says_of_an_output_that_cannot_be_written(tmp_path):
    with pytest.raises(OutputError, match="No space left on device; make room"):
        launch(write_on_the_first, 2, str(tmp_path / "said"))
    assert (tmp_path / "said").read_text() == ""


def test_ranks_that_could_not_meet_are_refused():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(rs.ConfigError, match="ulimit -f allows files of 1024 bytes"):
            launch(rank_times, 2, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_ranks_are_refused():
    with pytest.raises(rs.ConfigError, match="0 ranks: at least 1"):
        launch(rank_times, 0, 5)


def sleep_long():
    os.write(1, b"asleep\n")  # at once: print writes the end of the line by itself
    time.sleep(60)


def end_when_told():
    told = []
    signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    os.write(1, b"asleep\n")
    deadline = time.monotonic() + 30
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(told)


def started(function, *, then="", **options):
    """A launcher of two such ranks in a process group of its own, when both have said a line."""
    code = (
        "import os, signal\n"
        f"from tests.torch.runtime.test_launch import launch, {function}\n"
        "if __name__ == '__main__':\n"
        f"    try: print(launch({function}, 2, **{options}))\n"
        "    except KeyboardInterrupt: print('interrupted')\n"
        f"    {then}\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == process.stdout.readline() == "asleep\n"
    return process


@pytest.mark.parametrize(
    ("number", "forward_signals"), [(signal.SIGINT, False), (signal.SIGHUP, False), (signal.SIGINT, True)]
)
def test_an_interrupt_ends_all_ranks_in_one_line(number, forward_signals):
    process = started("sleep_long", forward_signals=forward_signals)
    os.killpg(process.pid, number)
    out, errors = process.communicate(timeout=20)
    assert (out, errors) == ("interrupted\n", "")
    assert all_gone(process.pid, within_seconds=10)


def test_a_signal_to_the_whole_group_reaches_ranks_that_end_by_themselves():
    another = "os.kill(os.getpid(), signal.SIGTERM)"  # it has its answer: another signal must not take it
    process = started("end_when_told", then=another, forward_signals=True)
    os.killpg(process.pid, signal.SIGUSR1)
    out, errors = process.communicate(timeout=20)
    assert out == "[True, True]\n" and process.returncode == 0 and "Traceback" not in errors
    assert all_gone(process.pid, within_seconds=10)


def never_end():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.write(1, b"asleep\n")
    time.sleep(60)


def test_a_second_interrupt_aborts_ranks_that_do_not_end():
    process = started("never_end", forward_signals=True, max_restarts=1)
    for _ in range(2):  # one that comes twice is one
        os.killpg(process.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(ABORT_AFTER_SECONDS + 0.3)
    struck = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    out, errors = process.communicate(timeout=20)
    assert out == "interrupted\n" and "Traceback" not in errors
    assert time.monotonic() - struck < 5
    assert all_gone(process.pid, within_seconds=10)


def test_nobody_outlives_a_killed_launcher():
    process = started("sleep_long")
    process.kill()
    process.communicate(timeout=20)
    assert all_gone(process.pid, within_seconds=10)


def all_gone(process_group: int, within_seconds: float) -> bool:
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(process_group, 0)
        except ProcessLookupError:
            return True
        # Where the first process of a system takes its time, what has ended is still a member for seconds.
        if sys.platform == "linux" and not any(map(is_running, members(process_group))):
            return True
        time.sleep(0.1)
    return False


def members(process_group: int) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getpgid(int(process.name)) == process_group:
                found.append(int(process.name))
    return found


def test_a_rank_that_waits_for_one_that_never_comes_says_so(monkeypatch, capfd):
    monkeypatch.setattr(launcher, "_WAIT_SECONDS", 0.2)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "9")):
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError):
        join(timeout=timedelta(seconds=2))
    assert "rank 1 has waited 0 s at 127.0.0.1:9 for all 2 ranks of this job; start" in capfd.readouterr().err

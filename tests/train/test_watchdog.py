"""The watchdog: it names who is missing, on every rank, and leaves an ordinary run alone."""

import re
import socket
import time

import pytest
import torch.distributed as dist

from ringspan.core.errors import EXIT_PEER_LOST, EXIT_STALLED, ConfigError, OutputError
from ringspan.torch.engine.transport.exchange import COUNTERS
from ringspan.torch.model.consistency.watchdog import Watchdog, _Link
from ringspan.torch.runtime.launch import launch
from ringspan.train.config.tables import WatchdogConfig
from tests.cases import long

QUICK = WatchdogConfig(min_seconds=1.0, timeout_steps=2, patience_seconds=30)


def wait_for(codes: list[int], seconds: float) -> None:
    started = time.monotonic()
    while not codes and time.monotonic() - started < seconds:
        time.sleep(0.01)


def wait_until_told(watchdog: Watchdog) -> None:
    here = watchdog._places[watchdog._rank]
    while (here.step, here.doing) != (watchdog._step, watchdog._doing):
        time.sleep(0.01)


def stall(folder, culprit):
    """Steps together, until the main thread of one rank does nothing any more."""
    codes: list[int] = []
    with Watchdog(QUICK, folder, end=codes.append) as watchdog:
        for step in range(1, 6):
            watchdog.step(step)
            dist.barrier()
            time.sleep(0.02)
        wait_until_told(watchdog)
        if dist.get_rank() != culprit:
            watchdog.step(6)
        wait_for(codes, 20)
    return codes


@pytest.mark.parametrize("culprit", [0, *long(2)])
def test_a_rank_that_stands_still_is_named_by_all(tmp_path, culprit):
    assert launch(stall, 3, tmp_path, culprit, threads=1) == [[EXIT_STALLED]] * 3
    for rank in range(3):
        report = (tmp_path / f"attempt-0-rank-{rank}.txt").read_text()
        assert f"rank {culprit} at step 5" in report and "(furthest behind)" in report
        assert (
            float(re.search(r"no progress for ([\d.]+) s", report)[1])
            >= QUICK.min_seconds
        )
        # the stack of the main thread
        assert "exit code 76" in report and "in wait_for" in report
        assert "last calls" not in report


def fall_silent(folder, culprit):
    """A rank is cut off while it saves, for which it has patience."""
    codes: list[int] = []
    watchdog = Watchdog(
        QUICK.model_copy(update={"silence_seconds": 2.0}), folder, end=codes.append
    )
    is_culprit = dist.get_rank() == culprit
    if is_culprit:
        watchdog._machine = "another"  # or it would be killed
    with watchdog:
        watchdog.step(1)
        dist.barrier()
        with watchdog.doing("saving"):
            wait_until_told(watchdog)
            if is_culprit:
                watchdog._tell, watchdog._judge, watchdog._receive = (
                    lambda *_: None for _ in range(3)
                )
                while len(list(folder.iterdir())) < 2:  # a report of each of the others
                    time.sleep(0.01)
            else:
                wait_for(codes, 20)  # less than it has patience
    return codes


@pytest.mark.parametrize("culprit", [*long(0), 2])
def test_a_rank_that_falls_silent_is_named_whatever_it_was_doing(tmp_path, culprit):
    for rank, codes in enumerate(launch(fall_silent, 3, tmp_path, culprit, threads=1)):
        if rank != culprit:
            assert codes == [EXIT_STALLED]
            report = (tmp_path / f"attempt-0-rank-{rank}.txt").read_text()
            assert float(re.search(r"no progress for ([\d.]+) s", report)[1]) >= 2.0
            assert re.search(
                rf"rank {culprit} at step 1.* \(saving\) \(silent, stopped or cut off\)",
                report,
            )


def fail_alone(mesh, folder, culprit):
    codes: list[int] = []
    try:
        with Watchdog(QUICK, folder, end=codes.append) as watchdog:
            watchdog.step(7)
            dist.barrier()
            if dist.get_rank() == culprit:
                raise ZeroDivisionError("by chance")
            wait_for(codes, 10)
    except ZeroDivisionError:
        return None
    return codes


@pytest.mark.parametrize("culprit", [0, 3])
def test_a_rank_that_fails_alone_is_named_by_the_others(pool, tmp_path, culprit):
    results = pool.run(fail_alone, 4, tmp_path, culprit)
    assert results == [
        None if rank == culprit else [EXIT_PEER_LOST] for rank in range(4)
    ]
    report = (tmp_path / f"attempt-0-rank-{1}.txt").read_text()
    assert (
        f"rank {culprit} failed with ZeroDivisionError: by chance at step 7" in report
    )


def refuse_alone(mesh, folder, culprit):
    """One rank refuses to go on; the exchanges of the others fail, one after the other."""
    codes: list[int] = []
    try:
        with Watchdog(QUICK, folder, end=codes.append) as watchdog:
            watchdog.step(7)
            dist.barrier()
            if dist.get_rank() == culprit:
                raise OutputError("no room")
            wait_for(codes, 0.1 if dist.get_rank() == 1 else 3)
            raise RuntimeError("connection closed by peer")
    except (OutputError, RuntimeError):
        return codes


def test_a_refusal_is_no_failure_of_those_that_waited(pool, tmp_path):
    assert pool.run(refuse_alone, 4, tmp_path, 3) == [[]] * 4
    assert list(tmp_path.iterdir()) == []


class SlowWatchdog(Watchdog):
    def _watch(self):
        time.sleep(0.5)
        super()._watch()


def leave_at_once(mesh, folder):
    """Rank 0 leaves before its thread has run, and rank 1 connects late."""
    codes: list[int] = []
    connect = socket.create_connection
    if dist.get_rank() == 1:
        socket.create_connection = lambda *args, **options: (
            time.sleep(0.2) or connect(*args, **options)
        )
    kind = SlowWatchdog if dist.get_rank() == 0 else Watchdog
    try:
        with kind(QUICK, folder, end=codes.append):
            if dist.get_rank() == 0:
                raise OutputError("no room")
            wait_for(codes, 1.5)
    except OutputError:
        pass
    finally:
        socket.create_connection = connect
    return codes


def test_a_rank_that_leaves_at_once_takes_leave_of_all(pool, tmp_path):
    assert pool.run(leave_at_once, 4, tmp_path) == [[]] * 4


def unreachable_for_one(mesh, folder):
    def connect(*args, **options):
        raise OSError("no route to host")

    real = socket.create_connection
    if dist.get_rank() == 2:
        socket.create_connection = connect
    try:
        with Watchdog(QUICK, folder):
            return "connected"
    finally:
        socket.create_connection = real


def test_a_rank_that_cannot_connect_is_named_by_all(pool, tmp_path):
    for outcome in pool.outcomes(unreachable_for_one, 4, tmp_path):
        assert isinstance(outcome, ConfigError)
        assert re.match(
            r"rank 2 cannot connect to rank 0 at 127.0.0.1:\d+: no route to host; open",
            str(outcome),
        )


def many_steps(folder):
    codes: list[int] = []
    with Watchdog(
        QUICK.model_copy(update={"min_seconds": 2.0}), folder, end=codes.append
    ) as watchdog:
        for step in range(1, 501):
            watchdog.step(step)
            if step % 100 == 0:
                dist.barrier()
            COUNTERS.num_posts += 1
            if step == 250:
                with watchdog.doing("evaluation"):
                    time.sleep(2.4)  # longer than a step may take
    return codes


def test_500_steps_with_a_long_evaluation_raise_no_alarm(tmp_path):
    assert launch(many_steps, 3, tmp_path, threads=1) == [[]] * 3
    assert list(tmp_path.iterdir()) == []


def strange_visitors(mesh, folder):
    """What is not one of the ranks is shown the door, and the watch goes on."""
    codes: list[int] = []
    with Watchdog(QUICK, folder, end=codes.append) as watchdog:
        watchdog.step(1)
        if dist.get_rank() == 0:
            for word in (
                b'{"token": "guess", "rank": 1}\n',
                b"GET / HTTP/1.1\n\n",
                b"\xff" * 70_000,
                b"[1]\n",
                b"",
            ):
                with socket.create_connection(
                    watchdog._server.getsockname()[:2]
                ) as visitor:
                    visitor.sendall(word)
                    if word:
                        visitor.settimeout(5)
                        with pytest.raises((ConnectionResetError, StopIteration)):
                            # heartbeats until the door closes
                            while visitor.recv(1000):
                                pass
                            raise StopIteration
            assert watchdog._server.getsockname()[0] == "127.0.0.1"
        dist.barrier()
        known: list[int] = []
        while len(known) < (3 if dist.get_rank() == 0 else 1):
            time.sleep(0.01)
            known = sorted(
                link.rank
                for link in watchdog._links
                if isinstance(link, _Link) and link.rank is not None
            )
        dist.barrier()
    return codes, known


def test_strangers_are_turned_away(pool, tmp_path):
    results = pool.run(strange_visitors, 4, tmp_path)
    assert results == [([], [1, 2, 3])] + [([], [0])] * 3

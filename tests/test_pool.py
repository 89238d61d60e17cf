"""The pool says where its ranks are when one does not answer, and gives no question the answer of another one."""

import signal
import time
from pathlib import Path

import pytest

from tests.pool import untimed


def give_the_signal_back(mesh):
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)  # as training does at its end


def sleep_on_rank_1(mesh, folder):
    if mesh.get_rank() == 1:
        Path(folder, "asleep").touch()
        wait_for(folder / "called")
    return "late"


def wait_for(file):
    while not file.exists():
        time.sleep(0.01)


def rank_of(mesh, word):
    return word, mesh.get_rank()


class Unreadable(Exception):
    """An exception that pickle writes and cannot read, like many that take more than a message."""

    def __init__(self, rank, reason):
        super().__init__(f"rank {rank}: {reason}")


def unreadable(mesh):
    return Unreadable(mesh.get_rank(), "cannot be read")


def test_starting_ranks_takes_none_of_a_tests_time():
    before = signal.getitimer(signal.ITIMER_REAL)[0]
    with untimed():
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
        time.sleep(1.1)
    assert before - 1 < signal.getitimer(signal.ITIMER_REAL)[0] <= before


def test_a_timed_out_test_names_the_waiting_rank_and_place(pool, monkeypatch, tmp_path):
    pool.run(give_the_signal_back, 4)  # ranks 2 and 3 are idle in what follows
    with monkeypatch.context() as patched:
        patched.setattr(
            pool._pipes[1],
            "poll",
            lambda seconds: wait_for(tmp_path / "asleep") or seconds < 10,
        )
        patched.setattr(pool, "close", lambda: None)
        with pytest.raises(
            TimeoutError, match="rank 1 did not answer within 100 s"
        ) as raised:
            pool.run(sleep_on_rank_1, 2, tmp_path)
    assert all(process.is_alive() for process in pool._processes)
    assert (
        "sleep_on_rank_1"
        in str(raised.value).partition("rank 1: ")[2].partition("rank 2: ")[0]
    )
    # As if it had answered all the same: the late answer is dropped.
    (tmp_path / "called").touch()
    pool._is_waiting = False
    assert pool.run(rank_of, 3, "next") == [("next", 0), ("next", 1), ("next", 2)]


def test_a_pool_left_in_the_middle_starts_anew(pool, tmp_path):
    def out_of_time(number, frame):
        raise pytest.fail.Exception("out of time")  # as pytest-timeout does

    before = [process.pid for process in pool._processes]
    previous = signal.signal(signal.SIGALRM, out_of_time)
    # A time limit of the runner is at its own count, which this one would replace.
    left, every = signal.setitimer(signal.ITIMER_REAL, 1)
    try:
        with pytest.raises(pytest.fail.Exception, match="out of time"):
            pool.run(sleep_on_rank_1, 2, tmp_path)
    finally:
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, left, every)
    assert pool.run(rank_of, 4, "next") == [("next", rank) for rank in range(4)]
    assert not {*before} & {process.pid for process in pool._processes}


def test_an_answer_that_cannot_be_read_leaves_none_behind(pool):
    with pytest.raises(TypeError, match="reason"):
        pool.run(unreadable, 3)
    assert pool.run(rank_of, 3, "next") == [("next", rank) for rank in range(3)]

"""The pool says where its ranks are when one does not answer."""

import signal
import time
from pathlib import Path

import pytest


def give_the_signal_back(mesh):
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)  # as training does at its end


def sleep_on_rank_1(mesh, folder):
    if mesh.get_rank() == 1:
        Path(folder, "asleep").touch()
        wait_for(folder / "called")


def wait_for(file):
    while not file.exists():
        time.sleep(0.01)


def test_a_timed_out_test_names_the_waiting_rank_and_place(pool, monkeypatch, tmp_path):
    pool.run(give_the_signal_back, 4)  # ranks 2 and 3 are idle in what follows
    monkeypatch.setattr(pool._pipes[1], "poll", lambda seconds: wait_for(tmp_path / "asleep") or seconds < 10)
    monkeypatch.setattr(pool, "restart", lambda: None)
    with pytest.raises(TimeoutError, match="rank 1 did not answer within 100 s") as raised:
        pool.run(sleep_on_rank_1, 2, tmp_path)
    (tmp_path / "called").touch()
    assert all(process.is_alive() for process in pool._processes)
    assert pool._pipes[1].recv() is None  # late, and not the answer of the next test
    assert "sleep_on_rank_1" in str(raised.value).partition("rank 1: ")[2].partition("rank 2: ")[0]

"""The pool says where its ranks are when one does not answer."""

import time

import pytest


def sleep_on_rank_1(mesh, seconds):
    if mesh.get_rank() == 1:
        time.sleep(seconds)


def test_a_test_that_runs_out_of_time_says_which_rank_waited_where(pool, monkeypatch):
    pool.run(sleep_on_rank_1, 2, 0)  # which imports this file
    monkeypatch.setattr(pool, "_timeout", 1)
    monkeypatch.setattr(pool, "restart", lambda: None)
    with pytest.raises(TimeoutError, match="rank 1 did not answer within 1 s") as raised:
        pool.run(sleep_on_rank_1, 2, 4)
    assert pool._pipes[1].recv() is None  # late, and not the answer of the next test
    assert "sleep_on_rank_1" in str(raised.value).partition("rank 1: ")[2].partition("rank 2: ")[0]

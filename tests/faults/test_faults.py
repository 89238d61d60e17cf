"""A bounded part of the faults; ``make faults`` runs all of them, many times, and holds their times to the promises."""

import os
import pickle
import random
import signal

import pytest

from ringspan.cli.commands.train import train_rank
from ringspan.torch.runtime.launch import launch
from ringspan.train.config.load import load_config
from tests.faults import faults
from tests.faults.hosts import why_not
from tests.faults.job import Job

pytestmark = pytest.mark.alone


@pytest.mark.timeout(300)
def test_a_killed_stopped_and_ended_job_resumes_bit_for_bit(tmp_path, monkeypatch):
    """One job: a rank is killed, then one is stopped, then the launcher gets SIGTERM; each is named, and it resumes."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "50")
    timeout = 3.0
    whole, job = (
        Job(
            tmp_path, name, steps=60, every_steps=3, max_restarts=2, min_seconds=timeout
        )
        for name in ("whole", "struck")
    )
    launch(train_rank, 2, load_config(whole.config), threads=1)
    row, generator = faults.Row(fault="all", promise="named"), random.Random(0)
    job.start()
    try:
        named, *_ = faults.kill_rank(job, 0, row, generator)
        assert named, row.failures
        check_calls(job, attempt=0)
        named, _ = faults.stop_rank(job, 1, row, generator, timeout)
        assert named, row.failures
        job.pid(1, attempt=2)
        stands = job.newest()
        job.until(lambda: job.newest() > stands, 60, "a checkpoint of the last start")
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.wait(60) == 75 and job.last_step() == job.newest() < 60, job.tail()
    finally:
        job.end()
    launch(train_rank, 2, load_config(job.config), threads=1)
    assert job.curve() == whole.curve() and len(job.curve()) == 60


def check_calls(job, attempt):
    """The rank that ended by itself has left what torch's flight recorder had, and says where."""
    [path] = job.run.rglob(f"calls-attempt-{attempt}-rank-*")
    calls = pickle.loads(path.read_bytes())
    names = [entry["profiling_name"] for entry in calls["entries"]]
    assert len(names) == 50 and "gloo:all_reduce" in names, names
    assert f"last calls in {path}" in job.text()


def test_a_kill_in_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path):
    row = faults.kill_in_save(tmp_path, 6)
    assert row.passed == row.tries == 6, row.failures


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_kill_while_a_trainer_saves_leaves_a_checkpoint(tmp_path):
    row = faults.kill_in_async_save(tmp_path, 3)
    assert row.passed == row.tries == 3, row.failures


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_two_hosts_name_each_other_when_their_link_is_cut(tmp_path):
    row = faults.cut_link(tmp_path, 1)
    assert row.tries == 1 and row.figures["exit_codes"] == [0, 0], row.failures
    assert row.figures["losses_bit_equal"]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("name", ["lost-node", "spot"])
def test_a_run_goes_on_with_fewer_hosts(tmp_path, name):
    strike, _ = faults.FAULTS[name]
    row = strike(tmp_path, 1)
    assert row.passed == row.tries == 1, row.failures


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_run_outlasts_a_full_disk(tmp_path):
    row = faults.full_disk(tmp_path, 2)
    assert row.passed == row.tries == 2, row.failures


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_outlasts_a_file_system_that_stalls(tmp_path):
    """For longer than the watchdog's time-out of a step, 3 s."""
    row = faults.stalled_disk(tmp_path, 2, stall_seconds=6)
    assert row.passed == row.tries == 2, row.failures


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["slow-rank", "slow-link"])
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_slow_rank_and_a_slow_link_are_named(tmp_path, name):
    strike, _ = faults.FAULTS[name]
    row = strike(tmp_path, 1)
    assert row.passed == row.tries == 1, row.failures

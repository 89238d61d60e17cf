"""Ends of a run, and how it goes on: a node is lost, a machine taken back, a disk full, a file system stalled.

``python -m tests.faults.endings CONFIG FOLDER``: a job of two ranks whose files are written to disk no longer while the
folder has a file ``stall``.
"""

import itertools
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import namespaces
from tests.faults.hosts import Hosts
from tests.faults.job import Job, uninterrupted
from tests.faults.rows import Row, spread

_SILENT = "silent, stopped or cut off"
_NOTICE_SECONDS = 120  # of clouds that take a spot machine back
_SWITCH = "stall"


def lost_node(parent: Path, times: int, seed: int = 0) -> Row:
    """One of three hosts is gone without a word; the two others start again and go on."""
    row = Row(
        fault="one of three hosts lost without a word",
        promise="the others name it within the time-out + 1 s and end; two hosts go on from the newest checkpoint, bit "
        "for bit as two ranks of one host do",
    )
    generator, timeout = random.Random(seed), 3.0
    named, gone, differences = list[float](), list[float](), list[float]()
    for number in range(times):
        steps = 60
        expected = uninterrupted(parent, steps).curve()
        job = Job(
            parent,
            f"lost-{number}",
            steps=steps,
            min_seconds=timeout,
            silence_seconds=timeout,
        )
        with _hosts(parent, job, 3) as (hosts, logs):
            _progress(job)
            time.sleep(generator.random() * 0.3)
            hosts.cut(2)
            struck = time.monotonic()
            for process, log in zip(hosts.processes[:2], logs[:2], strict=True):
                job.process, job.log = process, log
                _await_line(job, "rank 2 at step", _SILENT)
            named.append(time.monotonic() - struck)
            for process in hosts.processes[:2]:
                process.wait(120)
            gone.append(time.monotonic() - struck)
        saved, copy = job.newest(), _copied(parent, job, nproc=2)
        with _hosts(parent, job, 2) as (hosts, logs):
            codes = [process.wait(300) for process in hosts.processes]
        copy.start().wait(300)
        differences.append(_largest_difference(job.curve(), expected, saved))
        row.count(
            named[-1] <= timeout + 1
            and codes == [0, 0]
            and f"resuming after step {saved} " in logs[0].read_text()
            and differences[-1] <= 1e-6
            and job.curve() == copy.curve(),
            f"named after {named[-1]:.1f} s, {codes}, saved {saved}, difference {differences[-1]}: "
            f"{logs[0].read_text()[-500:]}",
        )
    row.figures = {
        "named_after_seconds": spread(named),
        "others_gone_seconds": spread(gone),
        "timeout_seconds": timeout,
        "largest_relative_difference": max(differences),
    }
    return row


def spot_machine(parent: Path, times: int, seed: int = 0) -> Row:
    """SIGTERM to torchrun of one of two hosts, whose machine is then taken away; the other goes on alone."""
    row = Row(
        fault="a spot machine taken back",
        promise=f"all save the same step within {_NOTICE_SECONDS} s; one host goes on from it, bit for bit as one rank "
        "does",
    )
    generator, steps = random.Random(seed), 60
    expected = uninterrupted(parent, steps).curve()
    gone = list[float]()
    for number in range(times):
        job = Job(parent, f"spot-{number}", steps=steps)
        host = number % 2
        with _hosts(parent, job, 2) as (hosts, logs):
            _progress(job)
            time.sleep(generator.random() * 0.3)
            struck = time.monotonic()
            hosts.terminate(host)
            codes = [process.wait(_NOTICE_SECONDS) for process in hosts.processes]
            gone.append(time.monotonic() - struck)
        last, saved = job.last_step(), job.newest()
        is_same = _same_steps(job.curve(), expected)
        copy = _copied(parent, job, nproc=1)
        with _hosts(parent, job, 1) as (hosts, logs):
            code = hosts.processes[0].wait(300)
        copy.start().wait(300)
        row.count(
            last == saved
            and is_same
            and 0 not in codes
            and code == 0
            and f"resuming after step {saved} " in logs[0].read_text()
            and job.curve() == copy.curve(),
            f"step {last}, saved {saved}, {codes}, then {code}, {is_same}: "
            f"{logs[0].read_text()[-500:]}",
        )
    row.figures = {"saved_and_gone_seconds": spread(gone)}
    return row


def full_disk(parent: Path, times: int) -> Row:
    """The run's disk has no byte left while steps and saves go on, and then has; saved beside the steps or not."""
    row = Row(
        fault="the run's disk full during saves",
        promise="the run goes on, says what is needed, and saves again; the checkpoint before loads; losses bit-equal",
    )
    # Steps enough for both the full disk and what comes after it.
    steps = 120
    expected = uninterrupted(parent, steps).curve()
    outlasted = list[int]()
    for number in range(times):
        is_beside = number % 2 == 0
        job = Job(parent, f"full-{number}", steps=steps, checkpoints=_saving(is_beside))
        job.run.mkdir()
        namespaces.run("mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(job.run))
        try:
            is_kept, steps_on, code = _fill_and_free(job.start())
            outlasted.append(steps_on)
            row.count(
                is_kept
                and code == 0
                and job.newest() == steps
                and job.curve() == expected,
                f"beside {is_beside}: kept {is_kept}, {code}, {job.newest()}: {job.tail()[-500:]}",
            )
        finally:
            job.end()
            namespaces.run("umount", "--lazy", str(job.run))
    row.figures = {"steps_since_the_checkpoint_before": outlasted}
    return row


def stalled_disk(parent: Path, times: int, stall_seconds: float = 60.0) -> Row:
    """Nothing that is written reaches the disk for a while, from the middle of a save on; beside the steps or not."""
    row = Row(
        fault=f"a file system that stalls for {stall_seconds:.0f} s during a save",
        promise="no rank is ended; the run goes on when the file system does; losses bit-equal",
    )
    expected = uninterrupted(parent, 60).curve()
    steps_meanwhile = dict[str, int]()
    for number in range(times):
        is_beside = number % 2 == 0
        job = Job(parent, f"stall-{number}", steps=60, checkpoints=_saving(is_beside))
        folder = parent / f"stall-{number}-switch"
        folder.mkdir()
        job.start(command=["tests.faults.endings", str(job.config), str(folder)])
        try:
            is_whole, took = _stall_for(job, folder, stall_seconds)
            code = job.wait(300)
        finally:
            job.end()
        steps_meanwhile["beside the steps" if is_beside else "in a step"] = took
        row.count(
            is_whole and code == 0 and job.newest() == 60 and job.curve() == expected,
            f"beside {is_beside}: {code}, whole {is_whole}, {job.newest()}: {job.tail()[-500:]}",
        )
    row.figures = {"steps_meanwhile": steps_meanwhile, "stall_seconds": stall_seconds}
    return row


def _fill_and_free(job: Job) -> tuple[bool, int, int]:
    """Fill a run's disk after some saves until steps have gone on, then make room.

    Return whether the last checkpoint was kept, the steps since then, and the exit code.
    """
    _await_save(job)
    filler = job.run / "filler"
    _fill(filler)
    before = job.newest()
    _await_line(job, "bytes are needed", "are free; make room")
    from_step = _shown_step(job)
    job.until(lambda: _shown_step(job) >= from_step + 6, 120, "steps")
    steps_on, is_kept = _shown_step(job) - before, job.newest() == before
    filler.unlink()
    return is_kept, steps_on, job.wait(300)


def _stall_for(job: Job, folder: Path, stall_seconds: float) -> tuple[bool, int]:
    """Let a job's writes stall for a while.

    Return whether its newest checkpoint is still the one from before, and the steps that it took meanwhile.
    """
    _await_save(job)
    (folder / _SWITCH).touch()
    job.until(lambda: any(folder.glob("stalled-*")), 60, "a stalled write")
    began, from_step, before = time.monotonic(), job.last_step(), job.newest()
    while time.monotonic() - began < stall_seconds:
        assert job.process is not None and job.process.poll() is None, job.tail()
        time.sleep(0.1)
    is_whole, took = job.newest() == before, job.last_step() - from_step
    (folder / _SWITCH).unlink()
    return is_whole, took


_numbers = itertools.count()


@contextmanager
def _hosts(
    parent: Path, job: Job, count: int
) -> Iterator[tuple[Hosts, Sequence[Path]]]:
    """So many hosts that train a job; the job waits for what the first one does."""
    number = next(_numbers)
    logs = [parent / f"{job.run.name}-{number}-{host}.log" for host in range(count)]
    command = ["-m", "ringspan", "train", str(job.config)]
    environment = {"HF_DATASETS_CACHE": str(parent / "cache")}
    with Hosts(logs, command, environment) as hosts:
        job.process, job.log = hosts.processes[0], logs[0]
        yield hosts, logs


def _progress(job: Job) -> None:
    """Wait until a job has gone on for some steps after a checkpoint."""
    job.until(lambda: job.newest() > 0 and job.last_step() > job.newest(), 180, "steps")


def _await_save(job: Job) -> None:
    job.until(lambda: job.newest() >= 10, 120, "a checkpoint")


def _await_line(job: Job, *words: str) -> None:
    job.until(lambda: _has_line(job.text(), *words), 120, f"line with {words}")


def _has_line(text: str, *words: str) -> bool:
    return any(all(word in line for word in words) for line in text.splitlines())


Curve = dict[int, tuple[float, float]]


def _copied(parent: Path, job: Job, nproc: int) -> Job:
    """A job that goes on from a copy of another's run, on so many ranks of one host."""
    copy = Job(parent, f"{job.run.name}-copy", nproc=nproc)
    shutil.copytree(job.run, copy.run)
    text = job.config.read_text().replace(str(job.run), str(copy.run))
    copy.config.write_text(text)
    return copy


def _largest_difference(found: Curve, expected: Curve, last: int) -> float:
    """The largest relative difference of losses until a step."""
    steps = range(1, last + 1)
    return max(abs(found[step][0] / expected[step][0] - 1) for step in steps)


def _same_steps(found: Curve, expected: Curve) -> bool:
    return all(found[step] == expected[step] for step in found)


def _saving(is_beside: bool) -> str:
    return f"async_save = {str(is_beside).lower()}\n"


def _fill(filler: Path) -> None:
    """Take all room that a disk has."""
    with filler.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(b"\0" * 4096)
            except OSError:
                return


def _shown_step(job: Job) -> int:
    """The last step that a run has printed."""
    shown = [line for line in job.text().splitlines() if line.startswith("step ")]
    return int(shown[-1].split()[1].split("/")[0]) if shown else 0


def _stalled(config: Any, folder: str) -> Any:
    """Train as ``ringspan train``; a file is synced only when there is no stall."""
    from ringspan.checkpoints import shards
    from ringspan.cli.commands.train import train_rank

    switch, synced = Path(folder, _SWITCH), shards.sync_file

    def sync(path: Path) -> None:
        while switch.exists():
            Path(folder, f"stalled-{os.getpid()}").touch()
            time.sleep(0.05)
        synced(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "sync_file", sync)
        return train_rank(config)


def main(path: str, folder: str) -> None:
    from ringspan.torch.runtime.launch import launch
    from ringspan.train.config.load import load_config

    launch(_stalled, 2, load_config(path), folder, threads=1)


if __name__ == "__main__":
    main(*sys.argv[1:])

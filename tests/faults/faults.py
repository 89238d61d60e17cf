"""The faults: each strikes real processes so many times and returns what was seen as a row of figures."""

import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

# here, and not in each fork that saves
from ringspan.checkpoints.checkpoint import (
    Checkpoints,
)
from tests.faults.endings import full_disk, lost_node, spot_machine, stalled_disk
from tests.faults.hosts import Hosts
from tests.faults.job import Job, is_running, newest_step, uninterrupted
from tests.faults.rows import Row, spread
from tests.faults.slow import quiet, slow_link, slow_rank


def kill(parent: Path, times: int, seed: int = 0) -> Row:
    """SIGKILL to a random rank at a random instant, again and again, in one job that restarts itself."""
    row = Row(
        fault="kill -9 of a random rank",
        promise="survivors end within 1 s, naming rank, step and hop; losses bit-equal; next step within 15 s",
    )
    generator, steps = random.Random(seed), 20 * times + 40
    expected = uninterrupted(parent, steps).curve()
    job = Job(parent, "kill", steps=steps, max_restarts=times)
    code, (named, ends, nexts) = _struck(
        job, times, lambda attempt: kill_rank(job, attempt, row, generator)
    )
    row.figures = {
        "named": sum(named),
        "survivors_gone_seconds": spread(ends),
        "next_step_seconds": spread(nexts),
        "exit_code": code,
        "losses_bit_equal": job.curve() == expected,
        "steps": steps,
    }
    return row


def _struck(
    job: Job, times: int, strike: Callable[[int], Sequence[Any]]
) -> tuple[int, Iterator[tuple[Any, ...]]]:
    """Strike every attempt of a job that restarts itself; return its exit code and what each strike saw."""
    job.start()
    try:
        seen = [strike(attempt) for attempt in range(times)]
        return job.wait(600), zip(*seen, strict=True)
    finally:
        job.end()


def kill_rank(
    job: Job, attempt: int, row: Row, generator: random.Random
) -> tuple[bool, float, float]:
    """SIGKILL a random rank; return True if all others name it, and seconds to their end and to the next step."""
    pids, culprit = _running(job, attempt, generator)
    before, struck = len(job.text()), time.monotonic()
    os.kill(pids.pop(culprit), signal.SIGKILL)
    job.until(lambda: not any(map(is_running, pids)), 60, "end of the survivors")
    ended = time.monotonic() - struck
    said = [
        line
        for line in job.text()[before:].splitlines()
        if f"rank {culprit} died at step" in line
    ]
    named = len(said) == len(pids) and all(
        "hop" in line and "exit code 77" in line for line in said
    )
    job.pid(0, attempt + 1)
    stands = job.last_step()
    job.until(lambda: 0 < job.last_step() != stands, 120, "next step")
    came = time.monotonic() - struck
    row.count(
        named and ended <= 1 and came <= 15,
        f"named {said}, ended {ended:.2f} s, next step {came:.1f} s",
    )
    return named, ended, came


def _running(job: Job, attempt: int, generator: random.Random) -> tuple[list[int], int]:
    """Wait for a random instant some steps after a checkpoint; return the processes and a random rank."""
    pids = [job.pid(rank, attempt) for rank in range(job.nproc)]
    from_step = job.newest()
    job.until(lambda: job.last_step() >= from_step + 7, 120, "progress")
    time.sleep(generator.random() * 0.3)
    return pids, generator.randrange(job.nproc)


_SILENT = "silent, stopped or cut off"


def stop(parent: Path, times: int, seed: int = 0) -> Row:
    """SIGSTOP of a random rank: who no longer answers is named after the time-out."""
    row = Row(
        fault="SIGSTOP of a random rank",
        promise="culprit named by all within the time-out + 1 s; the job goes on",
    )
    generator, steps, timeout = random.Random(seed), 20 * times + 40, 3.0
    expected = uninterrupted(parent, steps).curve()
    job = Job(parent, "stop", steps=steps, max_restarts=times, min_seconds=timeout)
    code, (named, seconds) = _struck(
        job, times, lambda attempt: stop_rank(job, attempt, row, generator, timeout)
    )
    row.figures = {
        "named": sum(named),
        "named_seconds": spread(seconds),
        "min_timeout_seconds": timeout,
        "exit_code": code,
        "losses_bit_equal": job.curve() == expected,
    }
    return row


def stop_rank(
    job: Job, attempt: int, row: Row, generator: random.Random, timeout: float
) -> tuple[bool, float]:
    """SIGSTOP a random rank; return True if the others name it, and in how many seconds."""
    pids, culprit = _running(job, attempt, generator)
    allowed = max(
        timeout, 10 * statistics.median(line["seconds"] for line in job.lines()[-6:])
    )
    before, struck = len(job.text()), time.monotonic()
    os.kill(pids[culprit], signal.SIGSTOP)
    job.until(lambda: _SILENT in job.text()[before:], 90, "word of who is missing")
    seconds = time.monotonic() - struck
    line = next(line for line in job.text()[before:].splitlines() if _SILENT in line)
    named = f"rank {culprit} at step" in line.split(";")[0] and "exit code 76" in line
    row.count(
        named and seconds <= allowed + 1,
        f"{seconds:.2f} s, allowed {allowed:.2f} s: {line}",
    )
    job.pid(0, attempt + 1, 90)
    return named, seconds


def terminate(parent: Path, times: int, seed: int = 0) -> Row:
    """SIGTERM, SIGINT or SIGUSR1, twice, to one rank or to the launcher, at a random instant of ``ringspan train``."""
    row = Row(
        fault="SIGTERM at a random instant",
        promise="all ranks save the same step, exit code 75; resume bit-equal",
    )
    generator, steps = random.Random(seed), 20 * times + 40
    expected = uninterrupted(parent, steps).curve()
    job, seconds = Job(parent, "term", steps=steps), []
    command = ["ringspan", "train", str(job.config), "--nproc", "2"]
    for attempt in range(times):
        number = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)[attempt % 3]
        by_launcher = attempt % 2 == 0
        job.start(command=command if by_launcher else None)
        try:
            from_step = job.newest()
            job.until(lambda s=from_step: job.last_step() > s, 120, "progress")
            time.sleep(generator.random() * 0.3)
            assert job.process is not None
            target = job.process.pid if by_launcher else job.pid(generator.randrange(2))
            struck = time.monotonic()
            os.kill(target, number)
            # the second may come when all have saved
            time.sleep(generator.random() * 0.6)
            with suppress(ProcessLookupError):
                os.kill(target, number)
            code = job.wait(60)
        finally:
            job.end()
        seconds.append(time.monotonic() - struck)
        last, newest = job.last_step(), job.newest()
        row.count(
            code == 75 and last == newest,
            f"{number.name}: exit code {code}, step {last}, saved {newest}",
        )
    code = job.start().wait(600)
    row.figures = {
        "saved_and_gone_seconds": spread(seconds),
        "exit_code_at_last": code,
        "losses_bit_equal": job.curve() == expected,
    }
    return row


def kill_in_save(parent: Path, times: int, seed: int = 0) -> Row:
    """SIGKILL of one of two ranks, or of both, while they save one checkpoint after the other."""
    row = Row(
        fault="kill -9 during a save",
        promise="old or new checkpoint loads, bit for bit; leftovers cleaned",
    )
    generator, found_steps, leftovers = random.Random(seed), [], 0
    folder = parent / "saves"
    context = multiprocessing.get_context("fork")
    for number in range(times):
        before = newest_step(folder)
        store = parent / f"store-{number}"
        ranks = [
            context.Process(target=_save_for_ever, args=(rank, store, folder, before))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + 60
        while not _has_begun(folder, before) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(generator.random() * 0.12)
        for process in (ranks, ranks[:1], ranks[1:])[number % 3]:
            process.kill()
        for process in ranks:
            process.join(20)
            process.kill()
            process.join()
        newest = newest_step(folder)
        leftovers += any(folder.glob("*.tmp-*"))
        outcome = context.Queue()
        reader = context.Process(
            target=_load_after, args=(parent / f"store-{number}-load", folder, outcome)
        )
        reader.start()
        step, right, clean = outcome.get(timeout=60)
        reader.join()
        found_steps.append(step)
        latest = (folder / "latest").read_text().strip()
        pointed = (folder / latest / "manifest.json").exists()
        row.count(
            right and clean and pointed and step == newest >= before,
            f"try {number}: step {step}, right {right}, clean {clean}, newest {newest}, before {before}, {latest}",
        )
    row.figures = {"saves_finished": found_steps[-1], "tries_with_leftovers": leftovers}
    return row


def kill_in_async_save(parent: Path, times: int) -> Row:
    """The same of a trainer of transformers, which is imported only then."""
    from tests.faults.trainer import kill_in_async_save

    return kill_in_async_save(parent, times)


def _values(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        f"tensor {i}": torch.randn(256, 257 + i, generator=generator) for i in range(8)
    }


def _save_for_ever(rank: int, store: Path, folder: Path, step: int) -> None:
    torch.set_num_threads(1)  # a forked process cannot use its parent's threads
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  the survivor's trace is not news
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    mesh = DeviceMesh("cpu", torch.arange(2))
    checkpoints = Checkpoints(folder, run_id="run", keep=2)
    while True:
        step += 1
        tensors = {
            n: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None)
            for n, t in _values(step).items()
        }
        error = checkpoints.save(
            step, tensors, {}, {"step": step}, mesh={"ring": 2}, layout="zigzag"
        )
        if error is not None:
            os._exit(1)


def _load_after(store: Path, folder: Path, outcome: Any) -> None:
    torch.set_num_threads(1)  # a forked process cannot use its parent's threads
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    checkpoints = Checkpoints(folder, run_id="run")
    found = checkpoints.find()
    if found.folder is None or found.manifest is None:
        outcome.put((0, False, False))
        return
    expected = _values(found.manifest.step)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    checkpoints.load(found.folder, found.manifest, tensors, None)
    right = (
        all(torch.equal(tensors[name], expected[name]) for name in expected)
        and not found.skipped
    )
    clean = not any(folder.glob("*.tmp-*"))
    outcome.put(
        (
            found.manifest.step,
            right and found.manifest.state["step"] == found.manifest.step,
            clean,
        )
    )


def _has_begun(folder: Path, before: int) -> bool:
    """The first save at least is done, so that there is something to lose."""
    return newest_step(folder) > before


def other_worlds(parent: Path, steps: int = 25, saved_at: int = 5) -> Row:
    """Saved by a ring of two; resumed by one rank, by four, by two replicas of two, and on another layout."""
    row = Row(
        fault="another world size, mesh or layout",
        promise=f"the next {steps - saved_at} losses within 1e-6; the same tokens",
    )
    whole = uninterrupted(
        parent, steps, optimizer="batch_size = 2", every_steps=saved_at
    )
    expected, worst = whole.curve(), {}
    for name, nproc, changes in (
        ("1 rank", 1, ()),
        ("2 ranks", 2, ()),
        ("4 ranks", 4, ()),
        ("2 x 2", 4, (("batch_size = 2", "batch_size = 1\n[mesh]\nreplicate = 2"),)),
        (
            "contiguous",
            2,
            (("[optimizer]", '[attention]\nlayout = "contiguous"\n[optimizer]'),),
        ),
    ):
        job = Job(parent, name.replace(" ", "-"), nproc=nproc)
        shutil.copytree(whole.run, job.run)
        shutil.rmtree(job.run / "model")
        for path in (job.run / "checkpoints").glob("step_*"):
            if int(path.name[5:]) > saved_at:
                shutil.rmtree(path)
        text = whole.config.read_text().replace(str(whole.run), str(job.run))
        for old, new in changes:
            text = text.replace(old, new)
        job.config.write_text(text)
        code = job.start().wait(300)
        found = job.curve()
        differences = [
            abs(found[step][0] / expected[step][0] - 1)
            for step in expected
            if step in found
        ]
        worst[name] = max(differences[saved_at:], default=1.0)
        tolerance = 0.0 if name == "2 ranks" else 1e-6
        right = (
            code == 0 and found.keys() == expected.keys() and worst[name] <= tolerance
        )
        row.count(
            right and f"resuming after step {saved_at}" in job.text(),
            f"{name}: {code}, {worst[name]}",
        )
    row.figures = {"largest_relative_difference": worst, "losses": steps - saved_at}
    return row


def clean_run(parent: Path, steps: int = 500) -> Row:
    """Nothing happens: nobody raises an alarm, and what watches costs next to nothing."""
    row = Row(
        fault=f"{steps} clean steps",
        promise="no false alarm; guard, handshake and watchdog <= 1 % of a step",
    )
    # Of one such short sequence per step, a gradient in 500 is nine times the usual one, in float64 too: a true alarm.
    job = uninterrupted(parent, steps, every_steps=50, optimizer="batch_size = 8")
    alarms = [
        line
        for line in job.text().splitlines()
        if "standard deviations" in line or "ends at step" in line
    ]
    row.count(len(job.curve()) == steps and not alarms, "; ".join(alarms))
    return row


def cost(parent: Path, times: int) -> Row:
    """What the guard's all-reduce and the watchdog's thread take, as a share of a step of two ranks.

    A step of 4096 tokens through a small model, the shortest that anyone would spread over ranks; the guard replaces an
    all-reduce of the peak memory that was there before it.
    """
    from ringspan.torch.runtime.launch import launch

    row = Row(
        fault="nothing", promise="guard, handshake and watchdog take <= 1 % of a step"
    )
    figures = launch(_measure_cost, 2, str(parent / "watched"), times, threads=1)[0]
    row.figures = figures
    row.count(figures["share_of_step"] <= 0.01, str(figures))
    return row


def _measure_cost(folder: str, times: int) -> dict[str, float]:
    from transformers import AutoConfig, AutoModelForCausalLM

    from ringspan.torch.engine.transport.agreement import agree
    from ringspan.torch.model.consistency.watchdog import Watchdog
    from ringspan.torch.parallelize import parallelize
    from ringspan.torch.runtime.mesh import init_mesh
    from ringspan.torch.shard_batch import shard_batch
    from ringspan.train.config.tables import GuardConfig, WatchdogConfig
    from ringspan.train.guard import Guard
    from ringspan.train.signals import StopRequest

    mesh, device = init_mesh(ring=2), torch.device("cpu")
    sizes = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    torch.manual_seed(0)
    model: Any = parallelize(
        AutoModelForCausalLM.from_config(
            AutoConfig.for_model("llama", **sizes, **heads)
        ),
        mesh,
    )
    tokens = torch.randint(
        0, 512, (1, 4096), generator=torch.Generator().manual_seed(0)
    )
    batch = shard_batch({"input_ids": tokens, "labels": tokens}, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    guard, facts = Guard(GuardConfig(), StopRequest(), device), {"layout": "zigzag"}
    agree(mesh["ring"].get_group(), facts)
    steps, judged, handshakes = [], [], []
    with Watchdog(WatchdogConfig(), Path(folder)) as watchdog:
        for step in range(1, times + 1):
            started = time.perf_counter()
            watchdog.step(step)
            loss = model(**batch).loss
            loss.backward()
            dist.barrier()  # so that the time below is the guard's own, not that of waiting for the other rank
            before = time.perf_counter()
            guard.judge(step, float(loss.detach()), 1.0, (), 0)
            judged.append(time.perf_counter() - before)
            optimizer.step()
            optimizer.zero_grad()
            steps.append(time.perf_counter() - started)
            before = time.perf_counter()
            for _ in range(4):  # once per layer
                agree(mesh["ring"].get_group(), facts)
            handshakes.append(time.perf_counter() - before)
        thread = time.pthread_getcpuclockid(watchdog._thread.ident)
        watching = time.clock_gettime(thread) / sum(steps)
    step = statistics.median(steps)
    own = statistics.median(judged) + statistics.median(handshakes)
    return {
        "step_seconds": round(step, 4),
        "guard_seconds": round(statistics.median(judged), 6),
        "handshake_seconds": round(statistics.median(handshakes), 6),
        "watchdog_share_of_a_core": round(watching, 5),
        "share_of_step": round(own / step + watching, 5),
    }


def cut_link(parent: Path, times: int, seed: int = 0) -> Row:
    """Two hosts whose link goes down at a random instant: each names the other; joined again, the run goes on."""
    row = Row(
        fault="the link between two hosts cut, and restored",
        promise="each host names the other's rank within the time-out + 1 s; losses bit-equal after a restart",
    )
    generator, steps, timeout = random.Random(seed), 20 * times + 40, 3.0
    expected = uninterrupted(parent, steps).curve()
    # in a save too
    job = Job(
        parent, "two-hosts", steps=steps, min_seconds=timeout, silence_seconds=timeout
    )
    command = ["-m", "ringspan", "train", str(job.config)]
    environment = {"HF_DATASETS_CACHE": str(parent / "cache")}
    named_after = []
    for attempt in range(times + 1):
        logs = parent / f"host-0-{attempt}.log", parent / f"host-1-{attempt}.log"
        with Hosts(logs, command, environment) as hosts:
            if attempt == times:
                codes = [process.wait(300) for process in hosts.processes]
                break
            # for what ``until`` says
            job.process, job.log = (
                hosts.processes[0],
                logs[0],
            )
            from_step = job.newest()
            job.until(lambda s=from_step: job.last_step() >= s + 7, 120, "progress")
            time.sleep(generator.random() * 0.3)
            allowed = max(
                timeout,
                10 * statistics.median(line["seconds"] for line in job.lines()[-6:]),
            )
            hosts.cut()
            struck = time.monotonic()
            for rank, (process, log) in enumerate(
                zip(hosts.processes, logs, strict=True)
            ):
                job.process, job.log, words = process, log, f"rank {1 - rank} at step"
                job.until(
                    lambda words=words: any(
                        words in line and _SILENT in line
                        for line in job.text().splitlines()
                    ),
                    90,
                    f"word of who is missing in {log.name}",
                )
            named = time.monotonic() - struck
            named_after.append(named)
            row.count(
                named <= allowed + 1,
                f"named after {named:.1f} s, time-out {allowed:.1f} s",
            )
    row.figures = {
        "named_after_seconds": spread(named_after),
        "timeout_seconds": timeout,
        "exit_codes": codes,
        "losses_bit_equal": job.curve() == expected,
        "steps": steps,
    }
    return row


FAULTS: dict[str, tuple[Callable[..., Row], int | None]] = {
    "kill": (kill, 20), "stop": (stop, 20), "term": (terminate, 20), "save": (kill_in_save, 100), "link": (cut_link, 5),
    "lost-node": (lost_node, 5), "spot": (spot_machine, 4), "full-disk": (full_disk, 4), "stall": (stalled_disk, 2),
    "trainer-save": (kill_in_async_save, 50), "slow-rank": (slow_rank, 5), "slow-link": (slow_link, 5),
    "quiet": (quiet, None),
    "worlds": (other_worlds, None), "clean": (clean_run, None), "cost": (cost, 20),
}  # fmt: skip
"""Each fault, and how often it strikes."""

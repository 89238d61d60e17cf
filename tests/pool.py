"""One long-lived pool of gloo ranks for all distributed tests: starting processes for each case is what makes suites
slow. On a machine with a GPU, the same tests run on ranks that share it over NCCL (from 2.30 on, see
test_two_ranks_on_one_gpu.py): ``RINGSPAN_TEST_DEVICE=cuda pytest tests/torch/mechanisms/folds/test_folds.py``.
"""

import faulthandler
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import ProcessGroupGloo
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

import ringspan as rs
from ringspan.torch.engine.transport import shared_memory as shared
from ringspan.torch.runtime.forks import settle
from ringspan.torch.runtime.mesh import make_mesh, take_timeout

SIZE = 4
DEVICE = os.environ.get("RINGSPAN_TEST_DEVICE", "cpu")
TIMEOUT_SECONDS = 100
START_SECONDS = 900
"""Seconds that ranks may take to import torch and meet, on a machine that has much else to do."""


class Pool:
    """``size`` processes, one thread each. ``run(f, ranks, ...)`` calls ``f(mesh, ...)`` on the first ``ranks`` of
    them. Those that are ``launched`` have what torchrun would put into their environment. An answer takes so many
    seconds at most.

    An answer carries the number of its question, and answers to earlier ones are dropped. When anything is raised
    before all ranks have answered (a time limit of pytest, Ctrl-C, an answer that cannot be unpickled), they are ended,
    and the next question starts new ones.

    ``mesh`` has the axes ``replicate`` and ``ring``, and ``tp`` where that is above 1; all are made at the start, since
    making one takes every process.
    """

    # "fork" in a process that has imported what ranks need, as planted bugs do.
    start_method = "forkserver" if DEVICE == "cpu" else "spawn"

    def __init__(
        self,
        size: int = SIZE,
        *,
        launched: bool = False,
        timeout_seconds: int = TIMEOUT_SECONDS,
    ) -> None:
        self.size, self._launched, self._timeout = size, launched, timeout_seconds
        self._context = mp.get_context(self.start_method)
        with untimed():
            self._start()

    def _start(self) -> None:
        # for the first word of each rank, which answers question 0
        self._number, self._is_waiting = (
            0,
            True,
        )
        descriptor, self._store = tempfile.mkstemp(prefix="ringspan-store-")
        os.close(descriptor)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self.size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve,
                args=(
                    rank,
                    theirs,
                    self._store,
                    self.size,
                    self._launched,
                    self._timeout,
                ),
                daemon=not self._launched,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        deadline = time.monotonic() + START_SECONDS
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} did not start in {START_SECONDS} s")
            pipe.recv()
        self._is_waiting = False

    def outcomes(
        self,
        function: Callable[..., Any],
        ranks: int,
        *args: Any,
        replicate: int = 1,
        tp: int = 1,
    ) -> list[Any]:
        """What each rank returned, or the exception that it raised."""
        # What was raised while starting or ending ranks leaves them half started; a test that failed has ended some.
        if self._is_waiting or not all(
            process.is_alive() for process in self._processes
        ):
            self.restart()
        self._number, self._is_waiting = self._number + 1, True
        try:
            for pipe in self._pipes[:ranks]:
                pipe.send((self._number, function, (ranks, replicate, tp), args))
            # of all ranks, so that it is before pytest's own
            deadline = time.monotonic() + self._timeout
            results = [self._answer(rank, deadline) for rank in range(ranks)]
        except BaseException:
            self.close()  # they would compute on beside the next tests
            raise
        self._is_waiting = False
        return results

    def _answer(self, rank: int, deadline: float) -> Any:
        """What the rank answers to the question of the current number."""
        pipe = self._pipes[rank]
        while pipe.poll(max(0.0, deadline - time.monotonic())):
            try:
                number, result = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died") from None
            if number == self._number:
                return result
        raise TimeoutError(
            f"rank {rank} did not answer within {self._timeout} s; they waited here:\n{self._stacks()}"
        )

    def run(
        self,
        function: Callable[..., Any],
        ranks: int,
        *args: Any,
        replicate: int = 1,
        tp: int = 1,
    ) -> list[Any]:
        """What each rank returned; the first exception of any rank is raised here."""
        results = self.outcomes(function, ranks, *args, replicate=replicate, tp=tp)
        for result in results:
            if isinstance(result, BaseException):
                self.restart()  # the others may be in the middle of an exchange
                raise result
        return results

    def _stacks(self) -> str:
        """Where each rank is, as Python's fault handler writes it when it gets the signal."""
        files = [Path(f"{self._store}-{rank}") for rank in range(self.size)]
        ranks = zip(self._processes, files, strict=True)
        alive = [
            (process.pid, file)
            for process, file in ranks
            if process.is_alive() and process.pid
        ]
        for pid, file in alive:
            os.truncate(file, 0)
            os.kill(pid, signal.SIGUSR2)
        deadline = time.monotonic() + 5
        # To the end of what their main threads do, which they write one after the other.
        while (
            not all(" in _serve\n" in file.read_text() for _, file in alive)
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)
        return "\n".join(
            f"rank {rank}: {file.read_text() or 'ended, or in no Python code'}"
            for rank, file in enumerate(files)
        )

    def restart(self) -> None:
        self.close()
        with untimed():
            self._start()

    # all of them, before one notices that another one is gone
    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for path in (
            self._store,
            *(f"{self._store}-{rank}" for rank in range(self.size)),
        ):
            Path(path).unlink(missing_ok=True)


@contextmanager
def untimed() -> Iterator[None]:
    """Stop the clock of pytest-timeout meanwhile. On a busy machine ranks take minutes to start, which are none of a
    test's, and a fixture of the session that ran out of one test's time would fail every test after it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    left, every = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, every)


def _serve(
    rank: int,
    pipe: Connection,
    store: str,
    size: int,
    launched: bool,
    timeout_seconds: int,
) -> None:
    settle()
    stacks = open(f"{store}-{rank}", "a")  # noqa: SIM115 - for as long as the process lives
    if launched:
        sizes = {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "RANK": rank,
            "LOCAL_RANK": rank,
        }
        os.environ |= {name: str(value) for name, value in sizes.items()} | {
            "OMP_NUM_THREADS": "1"
        }
    torch.set_num_threads(1)
    # A thread of gloo spins while another one sends, so a sender that is preempted by whom it woke costs both; batches
    # are not preempted by what they wake. Some containers allow no other scheduler.
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    _share_loop()
    share = shared._anonymous_file
    # Rings of three talk through sockets, as between hosts, so that the tests go both ways.
    shared._anonymous_file = lambda ranks: None if ranks == 3 else share(ranks)
    # ranks that wait for each other say so before we do
    timeout = timedelta(seconds=0.6 * timeout_seconds)
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
        # the tests' batches are on the CPU
        rs.shard_batch = partial(rs.shard_batch, device=torch.device("cuda"))
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    meshes = {
        (ranks, replicate, tp): _mesh(ranks, replicate, tp, size)
        for ranks in range(1, size + 1)
        for replicate in range(1, ranks + 1)
        for tp in range(1, ranks + 1)
        if ranks % (replicate * tp) == 0
    }
    number, result = 0, None
    while True:
        # Before each answer: training gives the signal back as Python knew it, which would end a rank that is idle.
        faulthandler.unregister(signal.SIGUSR2)
        faulthandler.register(signal.SIGUSR2, file=stacks)
        pipe.send((number, result))
        try:
            number, function, shape, args = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)  # whatever ran before
        try:
            result = tree_map_only(
                torch.Tensor, torch.Tensor.cpu, function(meshes[shape], *args)
            )
        except BaseException as error:
            error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
            result = error


def _share_loop() -> None:
    """Let one thread serve gloo's messages of all groups: each group's own would look a hundred times per second
    whether there are any, and a rank of the pool has thirty groups.
    """
    make, device = ProcessGroupGloo.__init__, ProcessGroupGloo.create_default_device()

    def make_on_device(
        self: Any,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        enable_reconfigure: bool = False,
    ) -> None:
        assert not enable_reconfigure, "torch 2.14 has it, and nobody here asks for it"
        options = ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [device], 2, timeout
        make(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = make_on_device


# as users' meshes are; one of fewer ranks cannot make groups by itself
def _mesh(ranks: int, replicate: int, tp: int, size: int) -> DeviceMesh:
    if ranks == size:
        return make_mesh(DEVICE, replicate, ranks // (replicate * tp), tp)
    axes, shape = ("replicate", "ring", "tp"), (replicate, -1, tp)
    num_axes = 3 if tp > 1 else 2
    mesh = DeviceMesh(
        DEVICE,
        torch.arange(ranks).view(shape[:num_axes]),
        mesh_dim_names=axes[:num_axes],
    )
    if dist.get_rank() < ranks:
        take_timeout(mesh)
    return mesh

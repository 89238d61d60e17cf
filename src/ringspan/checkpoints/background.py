"""Work during training: one job at a time in a thread of every rank, with a process group of its own."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.constants import default_pg_timeout

from ringspan.core.errors import CheckpointError
from ringspan.torch.engine.transport.collectives import gather
from ringspan.torch.runtime.launch import local_device
from ringspan.torch.runtime.mesh import world_timeout_seconds


class Background:
    """The jobs of one run during its steps. All ranks make it, start the same jobs and close it."""

    def __init__(self) -> None:
        """Make the process group; collective."""
        # A separate group, because a job runs while a training step does; gloo, because its data is on the CPU.
        # A rank may write for a long time, so the time-out is at least gloo's default.
        timeout = max(
            default_pg_timeout, timedelta(seconds=world_timeout_seconds(local_device()))
        )
        self.group: Any = dist.new_group(backend="gloo", timeout=timeout)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def start(self, what: str, job: Callable[[], None]) -> None:
        """Start a job; ``wait`` has returned since the last one.

        Its CheckpointError is kept for ``wait``, and so is the RuntimeError of an exchange with a lost rank, which the
        training step will notice too.
        """
        assert self._thread is None, "one job at a time"

        def run() -> None:
            try:
                job()
            except CheckpointError as error:
                self._error = error
            except RuntimeError as error:
                self._error = CheckpointError(f"{what}: {error}")

        self._thread = threading.Thread(target=run, name=what, daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> CheckpointError | None:
        """Wait for the current job; return its error, if any, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    def close(self) -> CheckpointError | None:
        error = self.wait()
        dist.destroy_process_group(self.group)
        return error

    def on_first(self, what: str, work: Callable[[], Any]) -> Any:
        """Run ``work`` on the first rank; return its result on every rank, or raise its failure."""
        return self.together(what, work if self.rank == 0 else lambda: None)[0]

    def together(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Run ``work`` on every rank and return all results; a failure on one fails on all, so none waits forever."""
        problem, result = None, None
        try:
            result = work()
        except (
            CheckpointError,
            OSError,
            SafetensorError,
            ValueError,
            MemoryError,
        ) as error:
            known = isinstance(error, CheckpointError)
            problem = str(error) if known else f"{type(error).__name__}: {error}"
        votes = gather((problem, result), self.group)
        problems = {
            rank: problem
            for rank, (problem, _) in enumerate(votes)
            if problem is not None
        }
        if problems:
            rank, first = next(iter(problems.items()))
            more = f" (and {len(problems) - 1} more ranks)" if len(problems) > 1 else ""
            raise CheckpointError(
                f"{what}: rank {rank}: {first}{more}" if what else f"{first}{more}"
            )
        return [result for _, result in votes]

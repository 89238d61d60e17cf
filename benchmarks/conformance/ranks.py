"""Processes that run the cases, restarted after a failure or hang so that no state leaks."""

import math
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.conformance.cases import CASES, Parts, Problem, Setting
from ringspan.core.messages.lines import one_line

READY: Final = "ready"
START_SECONDS: Final = 300.0


class Ranks:
    """``size`` processes that call ``module:function`` names."""

    def __init__(
        self,
        size: int,
        attention: str,
        loss: str | None,
        layout: str,
        device: str,
        seconds: float,
    ) -> None:
        self.size, self._seconds = size, seconds
        self._arguments = (attention, loss, layout, device, seconds)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, case: int) -> list[Any]:
        """Return each rank's result: parts of an error, the text of an exception, or None if it did not answer."""
        if not self._processes:
            self._start()
            # Imports may take longer than any case; communication begins when all ranks have theirs behind them.
            found = [self._answer(pipe, START_SECONDS) for pipe in self._pipes]
            if found != [READY] * self.size:
                self.close()
                return [
                    "did not start" if each in (None, READY) else each for each in found
                ]
        for pipe in self._pipes:
            pipe.send(case)
        found = [self._answer(pipe, self._seconds) for pipe in self._pipes]
        if not all(isinstance(each, dict) or is_unsupported(each) for each in found):
            self.close()
        return found

    def _answer(self, pipe: Connection, seconds: float) -> object:
        try:
            return pipe.recv() if pipe.poll(seconds) else None
        except (EOFError, ConnectionError):
            return "the process ended"

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="ringspan-conformance-")
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.size, store, theirs, os.getcwd(), *self._arguments),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._pipes = [], []


def find(name: str) -> Any:
    module, _, function = name.partition(":")
    if not (module and function):
        raise ValueError(f"{name!r} is not module:function")
    try:
        found = getattr(import_module(module), function)
    except (
        Exception
    ) as error:  # somebody's module may raise anything while it is imported
        raise ValueError(
            f"cannot find {name}: {type(error).__name__}: {one_line(error)}"
        ) from error
    if not callable(found):
        raise ValueError(f"{name} is a {type(found).__name__}, not a function")
    return found


def _serve(
    rank: int, size: int, store: str, pipe: Connection, folder: str, attention: str, loss: str | None, layout: str,
    device: str, seconds: float,
) -> None:  # fmt: skip
    import sys

    sys.path.insert(0, folder)
    torch.set_num_threads(1)
    functions = find(attention), find(loss) if loss else None
    pipe.send(READY)
    with suppress(EOFError):
        case = CASES[pipe.recv()]
        if device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds),
        )
        setting = Setting(*functions, layout, dist.group.WORLD, torch.device(device))
        while True:
            pipe.send(outcome(case.run, setting, case.problem))
            case = CASES[pipe.recv()]


def outcome(
    run: Callable[[Setting, Problem], Parts], setting: Setting, problem: Problem
) -> Parts | str:
    """Return a case's parts, or what was raised, in a line; what is not implemented says so first."""
    try:
        return run(setting, problem)
    except NotImplementedError as error:
        return f"not supported: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def is_unsupported(found: object) -> bool:
    return isinstance(found, str) and found.startswith("not supported: ")


def joined(found: Sequence[Parts]) -> dict[str, float]:
    """Return errors over all ranks from their parts; infinite if a rank compared nothing, or without a size."""
    names = {name: None for each in found for name in each}
    errors: dict[str, float] = {}
    for name in names:
        wrong, right = map(
            sum, zip(*(each.get(name, (math.inf, 0.0)) for each in found), strict=True)
        )
        errors[name] = (wrong / right) ** 0.5 if right else math.inf
    return errors

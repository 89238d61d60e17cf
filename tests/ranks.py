"""Ranks that may die: forks with a log each, which end as processes of their own do."""

import atexit
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringspan.torch.runtime.forks import serve_forks, settle


def ended(
    folder: Path, function: Callable[..., Any], *args: Any
) -> tuple[list[int], list[str]]:
    """Run ``function(*args)`` on two ranks; return exit codes and standard errors."""
    serve_forks(
        function.__module__,
        "ringspan.train.loop",
        "transformers.models.llama.modeling_llama",
    )
    context = multiprocessing.get_context("forkserver")
    logs = [folder / f"rank-{rank}.log" for rank in range(2)]
    ranks = [
        context.Process(
            target=_rank, args=(rank, folder / "store", log, function, args)
        )
        for rank, log in enumerate(logs)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
        process.kill()  # one that hangs has -9 in place of its code
        process.join()
    return [process.exitcode or 0 for process in ranks], [
        log.read_text() for log in logs
    ]


def _rank(
    rank: int, store: Path, log: Path, function: Callable[..., Any], args: Any
) -> None:
    settle()
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    code = 0
    try:
        function(*args)
    except Exception as error:
        # as the interpreter leaves it to what runs at exit
        sys.last_value, code = (
            error,
            1,
        )
        traceback.print_exc()
    atexit._run_exitfuncs()  # which a process of multiprocessing leaves out
    os._exit(code)

"""Fair timing among ranks: from a common start to the slowest rank's end."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ringspan.torch.runtime.launch import local_device
from ringspan.torch.transport.clock import synchronize


def timed(function: Callable[[], Any] | None, *, threads: int) -> float:
    """Return the seconds from a barrier until the slowest rank is done; a rank without a function sleeps."""
    torch.set_num_threads(threads)
    dist.barrier()
    device = local_device()
    synchronize(device)
    started = time.perf_counter()
    if function:
        function()
    synchronize(device)
    seconds = torch.tensor(time.perf_counter() - started if function else 0.0, device=device)
    torch.set_num_threads(1)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def timed_in_turns(functions: Mapping[str, Callable[[], Any]], repeats: int, *, threads: int) -> dict[str, list[float]]:
    """Return ``timed`` of each function per round, after one warm-up round."""
    rounds = [
        {name: timed(function, threads=threads) for name, function in functions.items()} for _ in range(repeats + 1)
    ]
    return {name: [found[name] for found in rounds[1:]] for name in functions}

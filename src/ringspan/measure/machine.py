"""A machine's description and speed, and the time and memory of a piece of work."""

import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ringspan.torch.engine.transport.clock import synchronize
from ringspan.torch.runtime.launch import local_device

_LEAST_CALLS: Final = 3  # the first may compile something
_MOST_CALLS: Final = 6
_ENOUGH_SECONDS: Final = 0.5


def describe_machine() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "processor": _processor(),
        "cores": num_cores(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "cuda": torch.version.cuda if cuda else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ringspan": package_version("ringspan"),  # None in a folder of sources
        "date": date.today().isoformat(),
    }


def default_ranks() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def num_cores() -> int:
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def peak_bytes(device: torch.device) -> int:
    """Return this process's peak memory: allocated on its CUDA device, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@lru_cache(maxsize=8)
def measure_flops(
    device: torch.device, dtype: torch.dtype, *, size: int | None = None
) -> float:
    """Measure this rank's FLOP/s of a square matrix product, the best of a few; once per process."""
    size = size or (4096 if device.type == "cuda" else 1024)
    a = torch.randn(size, size, device=device, dtype=dtype)
    return 2.0 * size**3 / fastest(lambda: torch.mm(a, a), device)


def fastest(function: Callable[[], Any], device: torch.device) -> float:
    times: list[float] = []
    synchronize(device)
    while len(times) < _LEAST_CALLS or (
        len(times) < _MOST_CALLS and sum(times) < _ENOUGH_SECONDS
    ):
        started = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)


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
    seconds = torch.tensor(
        time.perf_counter() - started if function else 0.0, device=device
    )
    torch.set_num_threads(1)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def allocated_bytes(function: Callable[[], Any]) -> int:
    """Return the peak of the bytes that ``function()`` allocates, on top of those already held."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # Keep torch's profiler from reporting its start and end on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    changes = sorted(
        (event.start_ns(), event.nbytes())  # pyright: ignore[reportAttributeAccessIssue]
        for event in events
        if event.name() == "[memory]"
    )
    return max(accumulate((change for _, change in changes), initial=0))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (
            line.partition(":")[2].strip()
            for line in lines
            if line.startswith("model name")
        ),
        platform.machine(),
    )

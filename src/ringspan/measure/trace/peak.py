"""Peak memory of a piece of work, whoever allocates it: operators, kernels and messages."""

import os
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def allocated_bytes(function: Callable[[], Any]) -> int:
    """Return the most bytes that ``function()`` holds at once beside what was there before it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # its profiler tells standard error that it starts and stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")  # pyright: ignore[reportAttributeAccessIssue]
    return max(accumulate((change for _, change in changes), initial=0))

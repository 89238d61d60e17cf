"""What a real step holds by the C library's own count: bytes that malloc has given out, looked at after each operator.

Independent of the tracker: it sees allocations of every thread and library. Only where glibc is.
"""

import ctypes
import gc
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from ringspan.measure.trace.dry_run import prepare, watch_step
from ringspan.measure.trace.tracker import MemoryTracker
from ringspan.plan.cost.setting import Setting

_FIELDS = [
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
]


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def heap_bytes() -> int:
    """Bytes in use: small ones of the heaps and large ones that were mapped on their own."""
    info = _mallinfo2()()
    return info.uordblks + info.hblkhd


@cache
def _mallinfo2() -> Any:
    function = ctypes.CDLL(None).mallinfo2
    function.restype = _Mallinfo
    return function


class HeapTracker(MemoryTracker):
    """A tracker that also asks malloc, which may take it a millisecond."""

    def __init__(self) -> None:
        super().__init__()
        self.asks = True
        self._other_bytes = self.peak_heap_bytes = 0

    def restart(self) -> None:
        """Between two steps: what is not a known tensor now (modules, caches of libraries) is not the step's."""
        super().restart()
        gc.collect()
        self._other_bytes = heap_bytes() - self.moments[-1].total_bytes
        self.peak_heap_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.asks:
            self.peak_heap_bytes = max(
                self.peak_heap_bytes, heap_bytes() - self._other_bytes
            )
        return result


def measured_peaks(mesh: DeviceMesh, config: Any, setting: Setting) -> tuple[int, int]:
    """Peak of the second step of a real run on the last rank: by malloc's count, and by the tracker's. The others only
    take part.
    """
    torch.manual_seed(0)
    tracker = HeapTracker()
    with (
        tracker if mesh["ring"].get_local_rank() == setting.ring - 1 else nullcontext()
    ):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, setting.parameter_dtype)
        ).train()
        model, optimizer, batch = prepare(model, mesh, setting)
        tracker.watch_model(model)
        for asks in (False, True):  # in the first step libraries fill their caches
            tracker.asks = asks
            watch_step(tracker, model, optimizer, batch)
    return tracker.peak_heap_bytes, tracker.peak.total_bytes

"""Timestamps of a device: on CUDA of the current stream, else of the host."""

import time

import torch

Moment = float | torch.cuda.Event


def now(device: torch.device) -> Moment:
    """Return the completion time of work requested so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(start: Moment, end: Moment) -> float:
    """Return the time between two moments; on CUDA ``synchronize`` first."""
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return start.elapsed_time(end) / 1e3
    assert isinstance(start, float) and isinstance(end, float), (
        "two moments of one device"
    )
    return end - start

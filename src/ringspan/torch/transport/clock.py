"""Points in time of a device's work: of the current stream on CUDA, where the host runs ahead, else of the host."""

import time

import torch

Moment = float | torch.cuda.Event


def now(device: torch.device) -> Moment:
    """The moment at which what has been asked for so far is done."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def synchronize(device: torch.device) -> None:
    """Let the host wait for all that the device was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(start: Moment, end: Moment) -> float:
    """From one moment to another; on CUDA both must have passed (``synchronize``)."""
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return start.elapsed_time(end) / 1e3
    assert isinstance(start, float) and isinstance(end, float), "two moments of one device"
    return end - start

"""Parent process of forked local ranks; it imports torch itself, so it can start early."""

import gc
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, Final

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Save-and-end signals of schedulers, terminals, and Slurm ahead of a time limit."""
ABORT_AFTER_SECONDS: Final = 1.0
"""Minimum delay of a second SIGINT; terminals and launchers both deliver the first to all."""

# Devices of NVIDIA, of AMD, and of Windows below Linux.
_GPUS: Final = (
    "/dev/nvidiactl",
    "/dev/kfd",
    "/dev/dxg",
)


def serve_forks(*modules: str) -> bool:
    """Start the process that ranks fork from, with these modules imported; return whether it exists."""
    # Only on Linux without CUDA, which does not survive a fork. The process imports in parallel, so call this early.
    if sys.platform != "linux" or _has_gpu():
        return False
    forkserver.set_forkserver_preload([*modules])
    start_resource_tracker()  # otherwise started below, where it would unblock signals
    # A stop signal to the whole process group is meant for the ranks, which unblock it once they work.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return True


def start_resource_tracker() -> None:
    """Start multiprocessing's resource tracker with stop signals blocked: SIGUSR1 to the process group would end it."""
    # The tracker inherits the mask.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGHUP})
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _has_gpu() -> bool:
    """Return whether CUDA is available, or before torch's import whether a driver exists."""
    torch = sys.modules.get("torch")
    return (
        torch.cuda.is_available()
        if torch
        else any(Path(device).exists() for device in _GPUS)
    )


def settle() -> None:
    """Reset a fork to a program's defaults: stop signals, start method, no hold on its parent's lifetime."""
    gc.freeze()  # without it, each collection spends a third of a second on imported libraries
    server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    if server._forkserver_alive_fd is not None:
        # Only the launcher keeps its server alive; torch ends a rank that loses its parent.
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    multiprocessing.set_start_method(None, force=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

"""The process that local ranks are forks of. Importing torch is left to it, so it can begin before its launcher."""

import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, Final

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask a run to save and end: of schedulers, of a terminal, and of Slurm ahead of a time limit."""
ABORT_AFTER_SECONDS: Final = 1.0
"""What a second SIGINT has to come after the first to be a second one: a terminal sends each to all processes, and
launchers pass it on."""

_GPUS: Final = "/dev/nvidiactl", "/dev/kfd", "/dev/dxg"  # of NVIDIA, of AMD, and of Windows below Linux


def serve_forks(*modules: str) -> bool:
    """Start the process that ranks are forks of, with these modules imported, unless it runs already. Whether there is
    such a process: on Linux without CUDA, which does not outlive a fork.

    It imports while this process goes on, so a command that knows what its ranks will need calls this first.
    """
    if sys.platform != "linux" or _has_gpu():
        return False
    forkserver.set_forkserver_preload([*modules])
    start_resource_tracker()  # it would be started below, and unblock what is blocked
    # A stop signal for the whole process group is for the ranks, who take it from when they are at work.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return True


def start_resource_tracker() -> None:
    """Start the process that removes what multiprocessing leaves behind, unless it runs already, deaf to all stop
    signals: of those for the whole process group it hears SIGUSR1 by itself, and ends.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGHUP})  # it inherits that
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _has_gpu() -> bool:
    """As torch says once it is imported; before that, whether a driver is there."""
    torch = sys.modules.get("torch")
    return torch.cuda.is_available() if torch else any(Path(device).exists() for device in _GPUS)


def settle() -> None:
    """Give a fork of that process what a program of its own begins with: its stop signals, the usual way to start
    others, and no part in how long that process lives.
    """
    server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    if server._forkserver_alive_fd is not None:
        # The launcher alone keeps its server alive; a rank that loses its parent is ended by torch.
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    multiprocessing.set_start_method(None, force=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

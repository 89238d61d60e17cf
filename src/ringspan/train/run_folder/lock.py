"""One trainer per run folder: a lock on a file in it, which the system takes back with the process."""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from ringspan.core.errors import ConfigError

try:
    import fcntl
except ImportError:  # not Unix: nothing is locked there
    fcntl = None

_FILE: Final = "lock"
_GRACE_SECONDS: Final = 1.0  # for a process that has just been killed


class RunLock:
    """Held by rank 0 from when it has found, or made, the folder of its run until the run ends.

    POSIX locks: they vanish with the process, killed or not, and no child inherits them. On a file system that hosts
    share they hold between hosts where it supports them (NFS with its lock service, Lustre with ``flock``); where it
    refuses them nothing is locked.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._descriptor: int | None = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def take(self) -> None:
        """Take the lock of a folder that is there; leave one that is still to be made.

        Raises:
            ConfigError: another process has it.
        """
        if fcntl is None or self._descriptor is not None or not os.path.isdir(self._run):
            return
        try:
            descriptor = os.open(self._run / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return  # whoever writes there says what is wrong
        deadline = time.monotonic() + _GRACE_SECONDS
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
                holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
                os.close(descriptor)
                raise ConfigError(
                    f'run = "{self._run}": is being trained by {holder}; wait for it, or choose another with run=...'
                ) from None
            except OSError:  # a file system without locks
                os.close(descriptor)
                return
        self._descriptor = descriptor
        with suppress(OSError):  # a full disk: the lock holds without a name
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

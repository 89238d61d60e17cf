"""A file lock for one writer, released with its process."""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from ringspan.core.errors import ConfigError

try:
    import fcntl
except ImportError:  # nothing is locked outside Unix
    fcntl = None

_GRACE_SECONDS: Final = 1.0  # for a process that was just killed to let go


class FileLock:
    """POSIX lock with its holder's name in the file; without a file system's support it locks nothing."""

    def __init__(self, path: Path, holding: str, remedy: str) -> None:
        """Prepare the lock; a refusal reads "``holding`` PROCESS", then the remedy."""
        self._path, self._holding, self._remedy = path, holding, remedy
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def take(self) -> None:
        """Take the lock in a folder that exists; ConfigError if another process has it."""
        if (
            fcntl is None
            or self._descriptor is not None
            or not self._path.parent.is_dir()
        ):
            return
        try:
            descriptor = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
        except OSError:
            return  # writing there will fail with a better message
        deadline = time.monotonic() + _GRACE_SECONDS
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
                holder = (
                    os.read(descriptor, 200).decode(errors="replace").strip()
                    or "another process"
                )
                os.close(descriptor)
                raise ConfigError(f"{self._holding} {holder}; {self._remedy}") from None
            except OSError:  # the file system has no locks
                os.close(descriptor)
                return
        self._descriptor = descriptor
        # On a full disk the lock holds without the holder's name.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(
                descriptor,
                f"process {os.getpid()} on {socket.gethostname()}\n".encode(),
                0,
            )

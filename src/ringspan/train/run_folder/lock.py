"""One trainer per run folder."""

from pathlib import Path

from ringspan.core.files.lock import FileLock


class RunLock(FileLock):
    """The lock that rank 0 holds from when it has found or made the run's folder until the run ends."""

    def __init__(self, run: Path) -> None:
        remedy = "wait for it, or choose another with run=..."
        super().__init__(run / "lock", f'run = "{run}": is being trained by', remedy)

"""One trainer per run folder."""

from pathlib import Path

from ringspan.core.files.lock import FileLock


class RunLock(FileLock):
    """Held by rank 0 from when it has found, or made, the folder of its run until the run ends."""

    def __init__(self, run: Path) -> None:
        remedy = "wait for it, or choose another with run=..."
        super().__init__(run / "lock", f'run = "{run}": is being trained by', remedy)

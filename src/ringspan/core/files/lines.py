"""A file of lines that grows during a run, and a disk that is full for a while."""

from pathlib import Path


class Lines:
    """Lines appended to a file, each at once; a line that finds no room is kept, and written when there is some."""

    def __init__(self, path: Path) -> None:
        self._path, self._kept, self._has_failed = path, b"", False
        # Unbuffered, so that a write tells how much of a line a full disk took.
        self._file = path.open("ab", buffering=0)

    def add(self, line: str) -> str | None:
        """Append a line; return a notice if lines are kept in memory from now on."""
        self._kept += f"{line}\n".encode()
        try:
            while self._kept:
                self._kept = self._kept[self._file.write(self._kept) :]
        except OSError as error:
            had_failed, self._has_failed = self._has_failed, True
            if had_failed:
                return None
            return f"{self._path} cannot be written ({error.strerror}): its lines wait in memory; make room"
        self._has_failed = False
        return None

    def close(self) -> None:
        """Close the file; lines that still wait are lost."""
        self._file.close()

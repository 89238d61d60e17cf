"""Lines reach a file at once, or once its disk has room."""

import errno
from pathlib import Path

import pytest

from ringspan.core.files.lines import Lines


class Disk:
    """A file on a disk with so many bytes left."""

    def __init__(self, room: int) -> None:
        self.room, self.content = room, b""

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = data[: self.room]
        self.room -= len(taken)
        self.content += taken
        return len(taken)

    def close(self) -> None:
        pass


def test_lines_that_find_no_room_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    disk = Disk(room=5)
    lines = Lines(tmp_path / "metrics.jsonl")
    monkeypatch.setattr(lines, "_file", disk)
    assert lines.add("one") is None
    notice = lines.add("two")
    assert notice and "metrics.jsonl cannot be written (No space left" in notice
    assert lines.add("three") is None and disk.content == b"one\nt"
    disk.room = 100
    assert lines.add("four") is None
    assert disk.content == b"one\ntwo\nthree\nfour\n"
    disk.room = 0
    assert lines.add("five") is not None


def test_lines_are_in_the_file_at_once_and_after_those_before(tmp_path: Path):
    path = tmp_path / "lines"
    path.write_text("before\n")
    lines = Lines(path)
    lines.add("ä")
    assert path.read_text(encoding="utf-8") == "before\nä\n"
    lines.close()

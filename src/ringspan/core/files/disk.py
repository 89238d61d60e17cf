"""Writes that survive a power cut."""

import os
from pathlib import Path


def write_synced(path: Path, text: str) -> None:
    """Replace a small file atomically, on the disk when this returns; its folder needs ``sync_folder``."""
    scratch = path.with_name(f"{path.name}.tmp-new")
    scratch.write_text(text, encoding="utf-8")
    sync_file(scratch)
    scratch.replace(path)


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    sync_file(path)

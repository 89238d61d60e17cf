"""The host that this process runs on: its memory, and which one it is."""

import os
from pathlib import Path


def host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def boot_id() -> str:
    """Return an identity of the running kernel, equal for all its processes; OSError if the host tells none."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()

"""This process's launcher and torchrun's variables, read before torch is imported."""

import multiprocessing
import os
from typing import Final

from ringspan.core.errors import ConfigError

_OF_A_RANK: Final = "RANK", "WORLD_SIZE"
_OF_ALL: Final = "MASTER_ADDR", "MASTER_PORT"


def is_rank() -> bool:
    """Return whether torchrun or an equivalent started this process as a rank; ConfigError for half a rank."""
    given = [name for name in _OF_A_RANK if os.environ.get(name)]
    if not given:
        return False
    missing = [name for name in (*_OF_A_RANK, *_OF_ALL) if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"{given[0]} is set in the environment, and {', '.join(missing)} not: start with torchrun, which sets "
            f"all of them, or unset {' and '.join(given)} to run without it"
        )
    size = _number("WORLD_SIZE", 1, 1 << 24)
    _number("RANK", 0, size - 1)
    _number("MASTER_PORT", 0, 65535)
    if "LOCAL_RANK" in os.environ:
        _number("LOCAL_RANK", 0, size - 1)
    return True


def is_launched() -> bool:
    """Return whether a waiting process, such as ``launch``, started it."""
    return multiprocessing.parent_process() is not None


def _number(name: str, least: int, most: int) -> int:
    text = os.environ[name].strip()
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ConfigError(
            f"{name} = {text!r} in the environment: should be a number from {least} to {most}; start with torchrun, "
            "which sets it"
        )
    return int(text)

"""Limits of our programs, and a check for Triton that imports nothing."""

import os
from functools import lru_cache
from importlib.util import find_spec
from typing import Final

LARGEST_HEADS: Final = {"bfloat16": 256, "float16": 256, "float32": 128}
"""Most numbers of a head, by dtype, whose sums fit into registers."""

OF_BATCH: Final = ["rows", "num_keys", "lse_b", "lse_h", "new_lse_b", "new_lse_h"]
"""Arguments that follow from a batch's lengths: Triton would compile again where 16 divides them, or they are 1."""
OF_ROWS: Final = ["lse", "old_lse", "new_lse"]
"""Pointers to a number for each row, which begin where a document does, and not at a multiple of 16 bytes."""


@lru_cache(maxsize=16)
def is_installed(module: str) -> bool:
    """Return whether a module is installed, without importing it."""
    try:
        return find_spec(module) is not None
    except ImportError:  # its parent package is not installed
        return False


def interprets_triton() -> bool:
    """Return whether Triton's interpreter stands in for a GPU: slow, for tests."""
    return is_installed("triton") and os.environ.get("TRITON_INTERPRET") == "1"

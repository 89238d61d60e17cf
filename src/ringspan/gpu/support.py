"""What our programs can do, and whether there is a Triton; nothing is imported."""

import os
from functools import lru_cache
from importlib.util import find_spec
from typing import Final

LARGEST_HEADS: Final = {"bfloat16": 256, "float16": 256, "float32": 128}
"""By dtype, the most numbers of a head whose sums fit into registers."""


@lru_cache(maxsize=16)
def is_installed(module: str) -> bool:
    """Whether a module could be imported; nothing is."""
    try:
        return find_spec(module) is not None
    except ImportError:  # the package above is not there
        return False


def has_triton() -> bool:
    return is_installed("triton")


def interprets_triton() -> bool:
    """Whether Triton's interpreter stands in for a GPU: slow, for tests."""
    return has_triton() and os.environ.get("TRITON_INTERPRET") == "1"

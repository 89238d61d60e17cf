"""The autocast of a pass, for its recomputation."""

from collections.abc import Callable

import torch


def autocast_now(kind: str) -> Callable[[], torch.autocast]:
    """Return a factory of contexts with a device's current autocast, for recomputation."""
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    caches = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(kind, dtype, enabled, caches)

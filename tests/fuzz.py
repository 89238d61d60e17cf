"""How many random examples the property tests draw: a few in ``make test``, many and new ones in ``make fuzz``."""

import os
from typing import Any

from hypothesis import settings

FACTOR = float(os.environ.get("RINGSPAN_FUZZ", "1"))


def examples(count: int, **options: Any) -> settings:
    """Settings for a test that draws ``count`` examples, times RINGSPAN_FUZZ."""
    return settings(max_examples=max(1, round(count * FACTOR)), **options)

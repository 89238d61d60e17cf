"""Timing of several functions in turns."""

from collections.abc import Callable, Mapping
from typing import Any

from ringspan.measure.machine import timed


def timed_in_turns(
    functions: Mapping[str, Callable[[], Any]], repeats: int, *, threads: int
) -> dict[str, list[float]]:
    """Return ``timed`` of each function per round, after one warm-up round."""
    rounds = [
        {name: timed(function, threads=threads) for name, function in functions.items()}
        for _ in range(repeats + 1)
    ]
    return {name: [found[name] for found in rounds[1:]] for name in functions}

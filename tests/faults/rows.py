"""The row of figures that a fault returns."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Row:
    """One fault: how often it was tried, how often what is promised happened, and what was measured."""

    fault: str
    promise: str
    tries: int = 0
    passed: int = 0
    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def count(self, passed: bool, why: str = "") -> None:
        self.tries += 1
        self.passed += passed
        if not passed:
            self.failures.append(why)


def spread(values: Sequence[float]) -> dict[str, float]:
    return (
        {
            "median": round(statistics.median(values), 3),
            "largest": round(max(values), 3),
        }
        if values
        else {}
    )

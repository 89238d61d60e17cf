"""Answers -> rows: means and their confidence intervals."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import Any, Final

Z_95: Final = 1.959963984540054


def wilson(mean: float, count: int) -> tuple[float, float]:
    """Compute the 95% interval of a share, after Wilson (1927); wide for scores within 0..1 with this mean."""
    if count < 1:
        return 0.0, 1.0
    square = Z_95**2 / count
    middle = (mean + square / 2) / (1 + square)
    reach = Z_95 / (1 + square) * math.sqrt(mean * (1 - mean) / count + square / (4 * count))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def normal(values: Sequence[float]) -> tuple[float, float] | None:
    """Compute the 95% interval of a mean by the values' spread; None for fewer than two."""
    if len(values) < 2:
        return None
    mean, reach = fmean(values), Z_95 * stdev(values) / math.sqrt(len(values))
    return mean - reach, mean + reach


def accuracy_rows(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[int, float | None], list[float]] = {}
    for record in records:
        groups.setdefault((record["length"], record["depth"]), []).append(record["score"])
    rows = []
    for (length, depth), scores in sorted(groups.items(), key=lambda group: (group[0][0], group[0][1] or 0.0)):
        low, high = wilson(accuracy := fmean(scores), len(scores))
        row: dict[str, Any] = {"length": length} | ({} if depth is None else {"depth": depth})
        rows.append(row | {"accuracy": accuracy, "items": len(scores), "low": low, "high": high})
    return rows


def loss_rows(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make a row per position range: the mean over its tokens in all documents, in nats per token and bits per byte."""
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for record in records:
        for part in record["parts"]:
            groups.setdefault((part["start"], part["stop"]), []).append(part)
    rows = []
    for (start, stop), parts in sorted(groups.items()):
        nats, tokens = sum(part["nats"] for part in parts), sum(part["tokens"] for part in parts)
        size = None if any(part["bytes"] is None for part in parts) else sum(part["bytes"] for part in parts)
        interval = normal([part["nats"] / part["tokens"] for part in parts])
        rows.append(
            {
                "length": stop,
                "start": start,
                "loss": nats / tokens,
                "bits_per_byte": nats / math.log(2) / size if size else None,
                "items": len(parts),
                "low": interval and interval[0],
                "high": interval and interval[1],
            }
        )
    return rows

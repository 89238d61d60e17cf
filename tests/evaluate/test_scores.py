"""Means and intervals, against numbers worked out by others."""

import math

import pytest

from ringspan.evaluate.runner import accuracy_rows, loss_rows, normal, wilson


@pytest.mark.parametrize(
    ("mean", "count", "low", "high"),
    [(0.0, 10, 0.0, 0.2775), (1.0, 10, 0.7225, 1.0), (0.5, 100, 0.4038, 0.5962), (0.81, 263, 0.7583, 0.8528)],
)
def test_wilsons_interval(mean, count, low, high):
    # statsmodels.stats.proportion.proportion_confint(..., method="wilson")
    assert wilson(mean, count) == pytest.approx((low, high), abs=2e-4)


def test_rows_of_accuracy_are_by_length_and_depth():
    records = [
        {"length": 20, "depth": 0.0, "score": 1.0},
        {"length": 10, "depth": 1.0, "score": 0.5},
        {"length": 10, "depth": 0.0, "score": 0.0},
        {"length": 10, "depth": 1.0, "score": 1.0},
    ]
    rows = accuracy_rows(records)
    assert [(row["length"], row["depth"], row["accuracy"], row["items"]) for row in rows] == [
        (10, 0.0, 0.0, 1),
        (10, 1.0, 0.75, 2),
        (20, 0.0, 1.0, 1),
    ]
    assert "depth" not in accuracy_rows([{"length": 1, "depth": None, "score": 1.0}])[0]


def test_rows_of_loss_weigh_tokens_and_bytes():
    parts = [
        {"start": 1, "stop": 4, "nats": 3.0, "tokens": 3, "bytes": 6},
        {"start": 4, "stop": 8, "nats": 8.0, "tokens": 4, "bytes": None},
    ]
    first, second = loss_rows([{"parts": parts}, {"parts": [{**parts[0], "nats": 9.0, "bytes": 10}]}])
    assert first["loss"] == 2.0 and first["items"] == 2
    assert first["bits_per_byte"] == pytest.approx(12 / 16 / math.log(2))
    assert (first["low"], first["high"]) == pytest.approx((2 - 1.96 * math.sqrt(2) / math.sqrt(2), 3.96), abs=1e-3)
    assert second["bits_per_byte"] is None and second["low"] is None
    assert normal([1.0]) is None

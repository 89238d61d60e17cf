"""Numbers as people read them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspan.core.messages.units import (
    shown_bandwidth,
    shown_bytes,
    shown_flops,
    shown_seconds,
    shown_speed,
)

SIZES = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6, "Z": 7, "Y": 8}
SECONDS = {
    "ns": 1e-9,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "days": 86_400.0,
}


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (shown_bytes(0), "0 B"),
        (shown_bytes(385), "385 B"),
        (shown_bytes(999_950_000), "1.00 GB"),
        (shown_bytes(1e33), "1,000,000,000 YB"),
        (shown_bandwidth(450e9), "450 GB/s"),
        (shown_flops(1.94e16), "19.4 PFLOP"),
        (shown_speed(989e12), "989 TFLOP/s"),
        (shown_seconds(0), "0 s"),
        (shown_seconds(0.00951), "9.51 ms"),
        (shown_seconds(0.99996), "1.00 s"),
        (shown_seconds(600), "10.0 min"),
        (shown_seconds(1e6), "11.6 days"),
        (shown_seconds(float("inf")), "inf s"),
    ],
)
def test_the_unit_suits_the_size(shown, expected):
    assert shown == expected


def value_of(number):
    return float(number.replace(",", ""))


@given(st.floats(1, 1e26))
def test_bytes_are_within_half_of_the_third_digit(value):
    number, prefix = re.fullmatch(
        r"([\d,.]+) ([kMGTPEZY]?)FLOP", shown_flops(value)
    ).groups()
    assert value_of(number) * 1000 ** SIZES[prefix] == pytest.approx(value, rel=0.0051)
    assert 1 <= value_of(number) < 1000 and len(re.sub(r"\D", "", number)) == 3


@given(st.floats(1e-9, 1e9))
def test_so_are_seconds(value):
    number, unit = re.fullmatch(r"([\d,.]+) (\w+)", shown_seconds(value)).groups()
    assert value_of(number) * SECONDS[unit] == pytest.approx(value, rel=0.0051)

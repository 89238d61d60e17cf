"""Numbers in three significant digits and decimal units (1 GB is 10^9 bytes)."""

from functools import partial
from math import floor, isfinite, log10
from typing import Final

_PREFIXES: Final = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
_SMALL_SECONDS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
# Up to twice a unit the smaller one is easier to read: 90 s, 100 min.
_LARGE_SECONDS: Final = ((86_400.0, "days"), (3600.0, "h"), (60.0, "min"))


def shown_seconds(seconds: float) -> str:
    if not isfinite(seconds):
        return f"{seconds} s"
    for size, unit in _LARGE_SECONDS:
        if abs(seconds) >= 2 * size:
            return f"{_digits(seconds / size)} {unit}"
    if seconds == 0:
        return "0 s"
    rounded = abs(float(f"{seconds:.2e}"))
    size, unit = next(
        (each for each in _SMALL_SECONDS if rounded >= each[0]), _SMALL_SECONDS[-1]
    )
    return f"{_digits(seconds / size)} {unit}"


def _prefixed(value: float, unit: str, *, is_whole: bool = False) -> str:
    if not isfinite(value):
        return f"{value} {unit}"
    # The prefix is that of the rounded number: 999.9 MB are 1.00 GB, not 1,000 MB.
    rounded = abs(float(f"{value:.2e}"))
    power = (
        0 if rounded < 1 else min(len(_PREFIXES) - 1, floor(log10(rounded) / 3 + 1e-12))
    )
    scaled = value / 1000**power
    return (
        f"{scaled:.0f} {unit}"
        if power == 0 and is_whole
        else f"{_digits(scaled)} {_PREFIXES[power]}{unit}"
    )


shown_bytes: Final = partial(_prefixed, unit="B", is_whole=True)
shown_bandwidth: Final = partial(_prefixed, unit="B/s")
shown_flops: Final = partial(_prefixed, unit="FLOP")
shown_speed: Final = partial(_prefixed, unit="FLOP/s")


def _digits(value: float) -> str:
    if value == 0:
        return "0"
    decimals = 2 - floor(log10(abs(float(f"{value:.2e}"))))
    return f"{value:,.{max(0, decimals)}f}"

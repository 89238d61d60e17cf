"""Slices of a layer's experts: which experts each holds, and how many slices ``auto`` takes."""

from itertools import pairwise
from typing import Final

from ringspan.core.errors import ConfigError
from ringspan.core.messages.numbers import check_whole
from ringspan.core.names import ExpertSlices

# Most bytes of experts that ``auto`` gathers at once, in the dtype that layers compute in. Three times as many are in
# memory: the slice that computes, the next one and one's gradients. It is large enough that a link is busy for many
# times its latency, and that each expert's product keeps its size.
MAX_SLICE_BYTES: Final = 2 << 30


def check_slices(wanted: object) -> None:
    """Raise ConfigError for a number of slices that is neither a positive integer nor ``auto``."""
    if wanted != "auto":
        check_whole("expert_slices", wanted, otherwise='; or use "auto"')


def num_slices(wanted: ExpertSlices, experts: int, num_bytes: int) -> int:
    """Return the slices of a layer's experts of ``num_bytes`` in all; ConfigError for more slices than experts."""
    if wanted == "auto":
        return min(experts, max(1, -(-num_bytes // MAX_SLICE_BYTES)))
    if wanted > experts:
        raise ConfigError(
            f"expert_slices={wanted}: layers have {experts} experts; use {experts} slices at most"
        )
    return wanted


def slice_bounds(experts: int, slices: int) -> list[tuple[int, int]]:
    """Return the first and last expert (exclusive) of each slice: sizes differ by one at most, larger ones first."""
    size, more = divmod(experts, slices)
    starts = [number * size + min(number, more) for number in range(slices + 1)]
    return [*pairwise(starts)]

"""Kernel calls of a pass, cached by schedule: every layer of a step makes the same ones."""

from collections.abc import Hashable
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ringspan.core.geometry.ranges import Ranges, stored
from ringspan.core.schedule.gather import Gathered
from ringspan.core.schedule.kernel_launches import (
    KernelLaunch,
    KernelLaunches,
    within_ranges,
)
from ringspan.core.schedule.schedule import Hop, Schedule
from ringspan.torch.engine import kernels
from ringspan.torch.engine.kernels.contract import InPlace, Returning
from ringspan.torch.engine.kernels.device import rules_of


class Call(NamedTuple):
    """A launch, and where its rows, keys and sums are stored."""

    launch: KernelLaunch
    rows: slice
    keys: slice
    sums: slice
    """Rows of the partial in forward, keys of dk and dv in backward."""


Calls = tuple[Returning | InPlace, tuple[Call, ...]]
"""A hop's kernel and its calls."""


class Planned(NamedTuple):
    """Calls of each hop; or of each stage, with the gathered keys arranged as the kernel needs them."""

    calls: tuple[Calls, ...]
    gathered: Gathered | None = None


_known: Final[WeakKeyDictionary[Schedule, dict[Hashable, Planned]]] = (
    WeakKeyDictionary()
)


def calls_of(
    schedule: Schedule, serving: tuple[str, ...], q: Tensor, *, is_backward: bool
) -> Planned:
    """Return the calls of a pass for queries like ``q``."""
    # Everything that ``kernels.choose`` reads, except the tiles.
    batch, heads, _, size = q.shape
    key = (
        serving,
        kernels.num_changes(),
        rules_of(q.device),
        q.device,
        q.dtype,
        (batch, heads, size),
        is_backward,
        torch.are_deterministic_algorithms_enabled(),
    )
    known = _known.get(schedule)
    if known is None:
        known = _known[schedule] = {}
    found = known.get(key)
    if found is None:
        found = known[key] = _planned(schedule, serving, q, is_backward=is_backward)
    return found


def _planned(
    schedule: Schedule, serving: tuple[str, ...], q: Tensor, *, is_backward: bool
) -> Planned:
    """Return the calls of a pass that no layer has asked for yet."""
    if schedule.gathered is not None:
        return _of_gathered(schedule.gathered, serving, q, is_backward=is_backward)
    return Planned(
        tuple(
            _calls(schedule, hop, serving, q, is_backward=is_backward)
            for hop in schedule.hops
        )
    )


def _of_gathered(
    gathered: Gathered, serving: tuple[str, ...], q: Tensor, *, is_backward: bool
) -> Planned:
    # A kernel that computes only square tiles may be the best one for stages, but not for undivided bands.
    kernel = kernels.choose(
        serving, (gathered.in_stages or gathered).bands, q, is_backward=is_backward
    )
    if gathered.suited(kernel.launches) is gathered:
        kernel = kernels.choose(serving, gathered.bands, q, is_backward=is_backward)
    suited = gathered.suited(kernel.launches)
    launches = (kernel.launches(stage.bands) for stage in suited.stages)
    return Planned(
        tuple((kernel, _stage(each, is_backward=is_backward)) for each in launches),
        suited,
    )


def _stage(launches: KernelLaunches, *, is_backward: bool) -> tuple[Call, ...]:
    return tuple(
        Call(one, rows, keys, keys if is_backward else rows)
        for one in launches
        for rows, keys in [(slice(one.q0, one.q1), slice(one.k0, one.k1))]
    )


def _calls(
    schedule: Schedule,
    hop: Hop,
    serving: tuple[str, ...],
    q: Tensor,
    *,
    is_backward: bool,
) -> Calls:
    """Return a hop's kernel and its launches, each with the places of its rows, keys and sums.

    The block of any hop but the first arrives packed, so its tokens lie at offsets in the packed ranges. Sums are
    packed too if they are sent: the key gradients in backward, the partial of another rank's queries on ``pass-q``.
    """
    block = hop.arrives.ranges if hop.index else None
    passes_queries = schedule.passes_queries and not is_backward
    sums = block and (
        hop.gradient
        if is_backward
        else hop.gradient_to_owner
        if passes_queries
        else None
    )
    kernel = kernels.choose(serving, hop.bands, q, is_backward=is_backward)
    cuts = (
        ranges
        for ranges in (block, sums if is_backward else None)
        if ranges is not None
    )
    return kernel, tuple(
        Call(
            one,
            _stored(block if passes_queries else None, one.q0, one.q1),
            _stored(None if passes_queries else block, one.k0, one.k1),
            _stored(sums, *((one.k0, one.k1) if is_backward else (one.q0, one.q1))),
        )
        for one in within_ranges(
            kernel.launches, hop.bands, *cuts, passes_queries=passes_queries
        )
    )


def _stored(ranges: Ranges | None, start: int, stop: int) -> slice:
    """Return where tokens [start, stop) lie among packed ranges; their own place if nothing is packed."""
    return slice(start, stop) if ranges is None else stored(ranges, start, stop)

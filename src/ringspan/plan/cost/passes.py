"""Seconds and bytes of one attention on any tokens and ranks, extrapolated from a few schedules."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Final

from ringspan.core.geometry.layer_mask import LayerMask
from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import Mask, causal
from ringspan.core.names import LayoutName
from ringspan.core.schedule.route import Route
from ringspan.core.schedule.timing import Pass, Speeds, pair_flops, passes, slowest
from ringspan.core.schedule.workspace import Shape
from ringspan.plan.cost.chosen import attended_pairs, chosen_passes, computed_pairs
from ringspan.plan.model.kinds import LayerKind

# Ranks, or groups of them: beyond, each adds the same to a pass. With fewer than about eight nodes that need not hold,
# as it is still open whether a pass waits for computation or for a link.
_LARGEST_SCHEDULE: Final = 64
# A schedule has hops x owners entries, and an inner ring of a TPU may have thousands of devices.
_MOST_RANKS: Final = 512
# Tokens of a group of ranks in the one schedule that is scaled to any number of tokens.
_TOKENS: Final = 8192
# with fewer, the diagonal is too large a share of the pairs to scale
_FEW_TOKENS: Final = 256


# A function that times forward and backward of one causal attention on the slowest rank, like ``attention_passes``.
Passes = Callable[
    [LayoutName, int, int, LayerMask, str, Shape, Speeds], tuple[Pass, Pass]
]


def seen_pairs(kind: LayerKind, length: int) -> int:
    """Count the pairs of a layer's attention in a document."""
    if kind.index is not None:
        return round(attended_pairs(kind.index, length))
    return kind.mask.num_pairs(length)


def even_passes(
    layout: LayoutName, length: int, ranks: int, mask: LayerMask, route: str, shape: Shape, speeds: Speeds,
) -> tuple[Pass, Pass]:  # fmt: skip
    """Return a lower bound over layouts and routes: even pairs without the diagonal, nothing sent."""
    pairs = (
        (mask.num_pairs(length - 1),) * 2
        if shape.index is None
        else computed_pairs(length, shape)
    )
    flops = (
        pair_flops(shape, is_backward=back) / ranks / speeds.flops
        for back in (False, True)
    )
    forward, backward = (count * each for count, each in zip(pairs, flops, strict=True))
    return Pass(forward, forward, 0.0, 0.0), Pass(backward, backward, 0.0, 0.0)


@lru_cache(maxsize=1024)
def attention_passes(
    layout: LayoutName, length: int, ranks: int, mask: LayerMask, route: str, shape: Shape, speeds: Speeds,
) -> tuple[Pass, Pass]:  # fmt: skip
    """Return both passes of a causal attention on the slowest rank; without windows one schedule serves all lengths."""
    if shape.index is not None:
        return chosen_passes(Layout(layout, length, ranks), causal(), shape, speeds)
    if shape.batch > 1:
        one = attention_passes(
            layout,
            length,
            ranks,
            mask,
            route,
            replace(shape, batch=1),
            speeds,
        )
        return repeated(shape.batch, one)
    way = Route.parse(route, ranks)
    split, usual = (
        Layout(layout, length, ranks),
        Layout(layout, _TOKENS // way.ulysses * ranks, ranks),
    )
    if (
        mask.sees_all
        and split.tokens_per_rank * way.ulysses >= _FEW_TOKENS
        and split != usual
    ):
        times = split.tokens_per_rank / usual.tokens_per_rank
        slower = replace(
            speeds,
            flops=speeds.flops / times**2,
            intra_node_bytes=speeds.intra_node_bytes / times,
            inter_node_bytes=speeds.inter_node_bytes / times,
        )
        forward, backward = attention_passes(
            layout, usual.length, ranks, mask, route, shape, slower
        )
        return _with_bytes(forward, times), _with_bytes(backward, times)
    seen = mask.of_document(length)
    return slowest_passes(split, seen, way, shape, speeds)


def slowest_passes(
    layout: Layout,
    mask: Mask,
    route: Route,
    shape: Shape,
    speeds: Speeds,
) -> tuple[Pass, Pass]:
    """Return forward and backward on the rank that takes longest."""
    forward, backward = (
        slowest(_passes(layout, mask, route, shape, speeds, is_backward=is_backward))
        for is_backward in (False, True)
    )
    return forward, backward


def repeated(
    count: int, one: tuple[Pass, Pass], share: float = 1.0
) -> tuple[Pass, Pass]:
    """Return forward and backward ``count`` times, if only this ``share`` of their pairs is computed."""
    times = count * share, count * share, count, count
    forward, backward = (
        Pass(*(n * cost for n, cost in zip(times, each, strict=True))) for each in one
    )
    return forward, backward


def _with_bytes(one: Pass, times: float) -> Pass:
    return one._replace(
        intra_node_bytes=one.intra_node_bytes * times,
        inter_node_bytes=one.inter_node_bytes * times,
    )


def _passes(
    layout: Layout,
    mask: Mask,
    route: Route,
    shape: Shape,
    speeds: Speeds,
    *,
    is_backward: bool,
) -> Iterable[Pass]:
    """Return ``timing.passes``, above 64 ranks or groups extrapolated from 64 and 48, as each adds the same."""
    groups, nodes = (
        layout.ranks // route.ulysses,
        -(-layout.ranks // speeds.ranks_per_node),
    )
    if route.inner > 1:
        nodes = groups // route.inner
        grows_inside = min(groups, 2 * route.inner) > _MOST_RANKS
    else:
        grows_inside = _LARGEST_SCHEDULE * route.ulysses < 4 * speeds.ranks_per_node
    unit = nodes if grows_inside else route.inner
    # The ends of an inner ring matter less the longer it is, so use the longest ones allowed.
    most = max(
        2,
        (_MOST_RANKS if grows_inside and route.inner > 1 else _LARGEST_SCHEDULE)
        // unit,
    )
    large, small = most * unit, max(1, most * 3 // 4) * unit
    if groups <= large:
        return passes(
            layout,
            mask,
            route,
            shape,
            speeds,
            is_backward=is_backward,
        )

    def smaller(groups: int) -> tuple[Pass, ...]:
        ranks = groups * route.ulysses
        per_node = ranks // nodes if grows_inside else speeds.ranks_per_node
        fewer = Layout(layout.name, ranks * layout.tokens_per_rank, ranks)
        nearer = replace(speeds, ranks_per_node=per_node)
        way = (
            replace(route, inner=groups // nodes)
            if grows_inside and route.inner > 1
            else route
        )
        return passes(
            fewer,
            mask,
            way,
            shape,
            nearer,
            is_backward=is_backward,
        )

    beyond = (groups - large) / (large - small)
    return (
        Pass(*(a + (a - b) * beyond for a, b in zip(more, less, strict=True)))
        for more, less in zip(smaller(large), smaller(small), strict=True)
    )

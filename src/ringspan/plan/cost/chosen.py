"""Seconds and bytes of attention to keys that an index chooses, by the events of its passes."""

from functools import lru_cache, partial
from typing import Final

from ringspan.core.geometry.layout import CustomLayout, Layout
from ringspan.core.geometry.mask import Mask, causal
from ringspan.core.names import LayoutName
from ringspan.core.schedule.choosing import ChoosingPart, backward, forward
from ringspan.core.schedule.timing import Pass, Speeds, pair_flops, slowest, stretched
from ringspan.core.schedule.workspace import Shape
from ringspan.core.selection import (
    Index,
    exchanged,
    scored_and_chosen,
    scored_and_chosen_causally,
    seen_in,
)
from ringspan.plan.cost.loop import Held, most_held

# The exchange is computed for at most this number of ranks and tokens per rank, and scaled up to more.
_MOST_RANKS: Final = 64
_TOKENS: Final = 64


@lru_cache(maxsize=1024)
def chosen_passes(
    layout: Layout, mask: Mask, shape: Shape, speeds: Speeds
) -> tuple[Pass, Pass]:
    """Return forward and backward on the slowest rank; of a causal mask the first and the last are asked."""
    ranks = {0, layout.ranks - 1} if mask == causal() else range(layout.ranks)
    parts = [_part(layout, mask, rank, shape) for rank in ranks]
    pairs = (
        pair_flops(shape, is_backward=back) / speeds.flops for back in (False, True)
    )
    ahead, back = (
        slowest(stretched(walk(part), pair, part.rank, speeds) for part in parts)
        for walk, pair in zip((forward, backward), pairs, strict=True)
    )
    return ahead, back


@lru_cache(maxsize=4096)
def most_backward_bytes(
    layout: LayoutName, length: int, ranks: int, shape: Shape
) -> Held:
    """Return the most bytes that backward holds in one moment."""
    parts = (
        _part(Layout(layout, length, ranks), causal(), rank, shape)
        for rank in {0, ranks - 1}
    )
    return most_held(map(backward, parts))


def computed_pairs(length: int, shape: Shape) -> tuple[float, float]:
    """Return the pairs of a causal sequence in forward, with scoring as pairs of attention, and in backward."""
    part = _part(_alone(length), causal(), 0, shape)
    return part.choosing + part.attending, part.attending


def attended_pairs(index: Index, length: int) -> float:
    """Count the pairs of a causal sequence's attention."""
    return _pairs(_alone(length), causal(), 0, index)[1]


def scoring_flops(index: Index, length: int) -> float:
    """Return the FLOPs of scoring a causal sequence's keys."""
    return 2.0 * index.scored * _pairs(_alone(length), causal(), 0, index)[0]


def _part(layout: Layout, mask: Mask, rank: int, shape: Shape) -> ChoosingPart:
    """Return a rank's part in attention to chosen keys: bytes that it exchanges, and its work in scoring and attending.

    A causal sequence is exchanged as a short one on at most 64 ranks, with ``times`` the bytes per token. Work is in
    pairs of attention: scoring a key takes ``index.scored / (H (D + E))`` of a pair.
    """
    index, is_causal = shape.index, mask == causal()
    assert index is not None, "it chooses"
    few, times = layout, 1.0
    if is_causal and layout.tokens_per_rank > _TOKENS:
        few = Layout(
            layout.name,
            _TOKENS * min(layout.ranks, _MOST_RANKS),
            min(layout.ranks, _MOST_RANKS),
        )
        times = layout.padded_length / few.length
    scored, chosen = _pairs(layout, mask, rank, index)
    heads = shape.heads * (shape.head_dim + shape.value_dim)
    return ChoosingPart(
        rank=min(rank, few.ranks - 1),
        tokens=exchanged(few, mask, min(rank, few.ranks - 1)),
        own=few.tokens_per_rank,
        key_bytes=round(times * shape.itemsize * shape.batch * index.token),
        gradient_bytes=round(times * shape.sum_itemsize * shape.batch * index.token),
        index_bytes=round(times * shape.batch * shape.itemsize * index.key),
        choosing=scored * index.scored / heads,
        attending=chosen,
    )


def _alone(length: int) -> Layout:
    return Layout("contiguous", length, 1)


def _pairs(layout: Layout, mask: Mask, rank: int, index: Index) -> tuple[float, float]:
    """Return the pairs that one rank's queries score, and those that they attend to."""
    shares = 1
    if mask == causal() and not isinstance(layout, CustomLayout):
        # Stripes have equal shares: count the sequence once and divide.
        shares = layout.ranks if layout.name == "striped" else 1
        spans = _alone(layout.length).spans(0) if shares > 1 else layout.spans(rank)
        count = partial(scored_and_chosen_causally, spans, layout.length)
    else:
        count = partial(
            scored_and_chosen, seen_in(mask, layout.length)(layout.positions(rank))
        )
    scored, chosen = count(index.topk, index.size)
    near = count(index.window)[1] if index.window else 0
    return scored / shares, (
        index.keys * chosen + near
    ) / shares + index.others * layout.tokens_per_rank

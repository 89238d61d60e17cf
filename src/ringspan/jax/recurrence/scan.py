"""Traffic between spans: states, their maps, inputs before a span. N ranks, n local spans, M = N n spans.

All ranks run one program: a round of the scan is a ``ppermute`` per pair of local spans that exchange.
"""

from functools import lru_cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.layout import CustomLayout, Layout
from ringspan.core.recurrence.scan import scan_rounds
from ringspan.core.recurrence.spans import Links, places_of


class Span(NamedTuple):
    """Chunk of a rank, and its place among the rank's."""

    rank: int
    place: int


@lru_cache(maxsize=64)
def spans_of(layout: Layout) -> tuple[Span, ...]:
    """Return a layout's spans in order, of one length; LayoutError if striped, UnsupportedError if custom."""
    if isinstance(layout, CustomLayout):
        raise UnsupportedError(
            "a layout of any runs of positions is not supported in JAX, where one program serves all ranks; use "
            "contiguous or zigzag"
        )
    places_of(layout)
    chunks = 2 if layout.name == "zigzag" else 1
    first = layout.permutation.reshape(layout.ranks, chunks, -1)[:, :, 0]
    return tuple(Span(int(i) // chunks, int(i) % chunks) for i in np.argsort(first, axis=None))


def scan_states(maps: Array, states: Array, *, layout: Layout, axis_name: str = "sp", is_matrix: bool = False) -> Array:
    """Return the state that each local span takes, composed of earlier spans' maps ``A_j S + B_j``; differentiable.

    Args:
        maps: A of the local spans (n, B, ...): factors of the states' entries, or matrices (n, B, ..., K, K).
        states: B of the local spans (n, B, ...).
        layout: contiguous or zigzag (LayoutError if striped, UnsupportedError if custom).
        axis_name: the mesh axis that splits the sequence.
        is_matrix: A is a matrix, applied to S from the left.
    """
    spans = spans_of(layout)
    later = tuple(number > 0 for number in range(len(spans)))
    rank = lax.axis_index(axis_name)

    def applied(a: Array, b: Array) -> Array:
        return a @ b if is_matrix else a * b

    prefix_maps, prefixes = list(maps), list(states)
    taken = [jnp.zeros_like(state) for state in states]
    for messages in scan_rounds(Links(later, later)):
        before = list(prefix_maps), list(prefixes)  # what is sent in a round is from before it
        moves: dict[tuple[int, int, bool, bool, bool], list[tuple[int, int]]] = {}
        for message in messages:
            (sender, out), (receiver, into) = spans[message.source], spans[message.target]
            kind = out, into, message.has_map, message.composes, message.is_state
            moves.setdefault(kind, []).append((sender, receiver))
        for (out, into, has_map, composes, is_state), pairs in moves.items():
            arrived = lax.ppermute(before[1][out], axis_name, pairs)
            receives = _is_one_of(rank, [receiver for _, receiver in pairs], layout.ranks)
            if is_state:
                taken[into] = jnp.where(receives, arrived, taken[into])
            if composes:
                own = before[0][into]
                composed = applied(own, arrived) + before[1][into]
                prefixes[into] = jnp.where(receives, composed, prefixes[into])
                whole = jnp.zeros_like(own)
                if has_map:
                    whole = applied(own, lax.ppermute(before[0][out], axis_name, pairs))
                prefix_maps[into] = jnp.where(receives, whole, prefix_maps[into])
    return jnp.stack(taken)


def inputs_before(x: Array, width: int, *, layout: Layout, axis_name: str) -> Array:
    """Return the ``width`` tokens before each local span, 0 before the first: (n, B, t, ...) -> (n, B, width, ...)."""
    spans = spans_of(layout)
    tokens = x.shape[2]
    rank = lax.axis_index(axis_name)
    parts: list[Array] = []
    for reach in range(1, -(-width // tokens) + 1):  # spans shorter than it: from several of them
        count = min(tokens, width - (reach - 1) * tokens)
        tails = x[:, :, tokens - count :]
        halo = [jnp.zeros_like(tail) for tail in tails]
        moves: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for source, target in zip(spans, spans[reach:], strict=False):
            moves.setdefault((source.place, target.place), []).append((source.rank, target.rank))
        for (out, into), pairs in moves.items():
            arrived = lax.ppermute(tails[out], axis_name, pairs)
            halo[into] = jnp.where(_is_one_of(rank, [r for _, r in pairs], layout.ranks), arrived, halo[into])
        parts.append(jnp.stack(halo))
    return jnp.concatenate(parts[::-1], 2)


def _is_one_of(rank: Array, ranks: list[int], count: int) -> Array:
    table = np.zeros(count, np.bool_)
    table[ranks] = True
    return jnp.asarray(table)[rank]

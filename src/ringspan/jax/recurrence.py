"""Layers with a state over a ring's local tokens, token by token, as the tests' oracles compute.

Each span runs from zero, to get its affine map (A, B); the maps are scanned; it runs again from the state that it
takes. A document begins with state 0, so its span's A is 0. Values past the layout's length change nothing. All ranks
run one program: a round of the scan is a ``ppermute`` per pair of local spans that exchange. B batch, T local tokens, n
local spans of t tokens, H heads, K key size, V value size, C channels, N state size.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from ringspan.core.arguments import find_layouts
from ringspan.core.errors import LayoutError, UnsupportedError
from ringspan.core.geometry.layout import CustomLayout, Layout
from ringspan.core.names import LayoutName
from ringspan.core.recurrence.spans import Links, places_of, scan_rounds
from ringspan.jax.kernels.xla import accumulation_dtype, varying_like

__all__ = [
    "causal_convolution", "delta_rule", "lightning_attention", "scan_states", "selective_scan", "state_space_dual",
]  # fmt: skip

Step = Callable[[Array, Any], tuple[Array, Array]]
"""(state, one token's inputs) -> (state after it, output)."""
Starts = Sequence[int]
"""Positions at which documents begin, 0 the first, increasing: of every sequence of the batch."""


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    *,
    layout: LayoutName | Layout = "zigzag",
    axis_name: str = "sp",
    starts: Starts = (0,),
) -> Array:
    """``S_t = (I - beta_t k_t k_t^T) diag(a_t) S_{t-1} + beta_t k_t v_t^T`` and ``o_t = S_t^T q_t / sqrt(K)``.

    The gated delta rule, or Kimi delta attention; differentiable, inside ``shard_map``.

    Args:
        q, k: local tokens (B, T, H, K), in the layout's order; v (B, T, H, V); beta (B, T, H).
        log_decay: log a, per head (B, T, H) or key channel (B, T, H, K).
        layout: contiguous or zigzag. A name means a sequence of N x T tokens.
        axis_name: the mesh axis that splits the sequence.
        starts: where documents begin; each is computed by itself.

    Returns:
        (B, T, H, V), in v's dtype.

    Raises:
        LayoutError: striped tokens, or local arrays that do not fit the layout.
        UnsupportedError: shapes or starts that do not fit.
    """
    channels = log_decay if log_decay.ndim == 4 else log_decay[..., None]
    _check({"q": q, "k": k, "v": v, "log_decay": channels, "beta": beta}, 3, heads=2)
    size, width = k.shape[-1], v.shape[-1]

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        """Return the state after a token, and the token's output.

        ``S' = diag(a) S``, ``S'' = S' + beta k (v - S'^T k)^T`` and ``o = S''^T q / sqrt(K)``. Columns of S after the
        first V hold the span's matrix: they begin as the identity, and their values v are 0.
        """
        q, k, v, decay, beta = token
        state = state * decay[..., None]
        told = jnp.einsum("bhk,bhkv->bhv", k, state)
        v = jnp.pad(v, ((0, 0), (0, 0), (0, state.shape[-1] - width)))
        state = state + jnp.einsum("bhk,bhv->bhkv", k, (v - told) * beta[..., None])
        return state, jnp.einsum("bhk,bhkv->bhv", q, state) * size**-0.5

    def begun(batch: int) -> Array:
        identity = jnp.broadcast_to(jnp.eye(size), (batch, q.shape[2], size, size))
        return jnp.concatenate(
            (jnp.zeros((batch, q.shape[2], size, width)), identity), -1
        )

    def map_of(end: Array, *_: object) -> tuple[Array, Array]:
        return end[..., width:], end[..., :width]

    inputs = (q, k, v, jnp.exp(_wide(channels)), beta)
    shape = (q.shape[2], size, width)
    return _recurrence(
        step,
        inputs,
        shape,
        map_of,
        layout,
        axis_name,
        starts,
        v.dtype,
        begun=begun,
        is_matrix=True,
    )


def state_space_dual(
    x: Array,
    dt: Array,
    a: Array,
    b: Array,
    c: Array,
    d: Array | None = None,
    *,
    layout: LayoutName | Layout = "zigzag",
    axis_name: str = "sp",
    starts: Starts = (0,),
) -> Array:
    """Mamba-2: ``S_t = exp(a dt_t) S_{t-1} + dt_t x_t b_t^T``, ``y_t = S_t c_t + d x_t`` (B, T, H, V); differentiable.

    x (B, T, H, V), dt (B, T, H), a and d (H,), b and c (B, T, H, N); the rest, and what raises, as for ``delta_rule``.
    """
    _check({"x": x, "dt": dt, "b": b, "c": c}, 3, heads=2)
    return _state_space((x, dt, b, c), a[:, None, None], d, layout, axis_name, starts)


def selective_scan(
    x: Array,
    dt: Array,
    a: Array,
    b: Array,
    c: Array,
    d: Array | None = None,
    *,
    layout: LayoutName | Layout = "zigzag",
    axis_name: str = "sp",
    starts: Starts = (0,),
) -> Array:
    """Mamba: ``s_t = exp(a dt_t) s_{t-1} + dt_t b_t x_t``, ``y_t = s_t c_t + d x_t`` (B, C, T); differentiable.

    x, dt (B, C, T), a (C, N), b and c (B, N, T), d (C,); the rest, and what raises, as for ``delta_rule``.
    """
    x, dt, b, c = (each.swapaxes(1, 2) for each in (x, dt, b, c))
    _check({"x": x, "dt": dt, "b": b, "c": c}, 3)
    # Each channel is a head of size 1; all share b and c.
    heads = (
        x[..., None],
        dt,
        b[:, :, None],
        c[:, :, None],
    )
    return _state_space(heads, a[:, None], d, layout, axis_name, starts)[
        ..., 0
    ].swapaxes(1, 2)


def lightning_attention(
    q: Array,
    k: Array,
    v: Array,
    slopes: Array,
    *,
    layout: LayoutName | Layout = "zigzag",
    axis_name: str = "sp",
    starts: Starts = (0,),
) -> Array:
    """``S_t = exp(-slope_h) S_{t-1} + k_t v_t^T`` and ``o_t = S_t^T q_t`` (B, H, T, V); differentiable.

    q, k (B, H, T, K), v (B, H, T, V), slopes (H,); the rest, and what raises, as for ``delta_rule``.
    """
    q, k, v = (each.swapaxes(1, 2) for each in (q, k, v))
    _check({"q": q, "k": k, "v": v}, 4, heads=2)
    steps = jnp.ones(v.shape[:3], accumulation_dtype(v.dtype))
    decay = -_wide(slopes)[:, None, None]
    return _state_space(
        (v, steps, k, q), decay, None, layout, axis_name, starts
    ).swapaxes(1, 2)


def causal_convolution(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    layout: LayoutName | Layout = "zigzag",
    axis_name: str = "sp",
    starts: Starts = (0,),
) -> Array:
    """``y_t = sum_i weight_i x_{t - K + 1 + i} + bias`` (B, C, T) per channel, within a document; differentiable.

    x (B, C, T), weight (C, K), bias (C,); the rest, and what raises, as for ``delta_rule``.
    """
    width = weight.shape[1] - 1
    split = _layout_of(layout, axis_name, x.shape[2])
    parts = _in_spans(x.swapaxes(1, 2), split, axis_name)
    if width:
        parts = jnp.concatenate(
            (inputs_before(parts, width, layout=split, axis_name=axis_name), parts), 2
        )
    tokens = parts.shape[2] - width
    ages = _ages(split, starts)[lax.axis_index(axis_name)][:, None, :, None]
    out = jnp.zeros_like(parts[:, :, :tokens], accumulation_dtype(x.dtype))
    for back in range(width + 1):
        # A document's first tokens do not see inputs of the document before.
        seen = jnp.where(
            ages >= back, parts[:, :, width - back : width - back + tokens], 0
        )
        out = out + weight[:, width - back] * seen
    out = (out if bias is None else out + bias).astype(x.dtype)
    return _joined(out).swapaxes(1, 2)


def _state_space(
    inputs: tuple[Array, ...],
    a: Array,
    d: Array | None,
    layout: LayoutName | Layout,
    axis_name: str,
    starts: Starts,
) -> Array:
    """Compute ``S_t = exp(a dt_t) S_{t-1} + dt_t x_t b_t^T``, ``y_t = S_t c_t + d x_t`` of inputs x, dt, b and c.

    x (B, T, H, V), dt (B, T, H), b and c (B, T, H, N), or (B, T, 1, N) for all heads, a (H, 1, 1) or (H, 1, N).
    """

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        x, dt, b, c = token
        state = (
            jnp.exp(a * dt[..., None, None]) * state
            + (dt[..., None] * x)[..., None] * b[..., None, :]
        )
        out = (state * c[..., None, :]).sum(-1)
        return state, out if d is None else out + d[:, None] * x

    def map_of(
        end: Array, begins: Array, inputs: tuple[Array, ...]
    ) -> tuple[Array, Array]:
        return jnp.where(
            begins.any(), 0, jnp.exp(a * inputs[1].sum(1)[..., None, None])
        ), end

    x, _, b, _ = inputs
    return _recurrence(
        step,
        inputs,
        (*x.shape[2:], b.shape[-1]),
        map_of,
        layout,
        axis_name,
        starts,
        x.dtype,
    )


def _recurrence(
    step: Step, inputs: tuple[Array, ...], shape: tuple[int, ...],
    map_of: Callable[[Array, Array, Any], tuple[Array, Array]], layout: LayoutName | Layout, axis_name: str,
    starts: Starts, dtype: DTypeLike, *, begun: Callable[[int], Array] | None = None, is_matrix: bool = False,
) -> Array:  # fmt: skip
    """Compute outputs (B, T, ...) of one token's rule ``step``; inputs (B, T, ...), states (B, *shape)."""
    # ``map_of`` returns A and B of a span from the state after it, if the span began with ``begun``, by default 0.
    split = _layout_of(layout, axis_name, inputs[0].shape[1])
    parts = [_in_spans(_wide(x), split, axis_name) for x in inputs]
    begins = (_ages(split, starts) == 0)[lax.axis_index(axis_name)]
    batch = len(inputs[0])
    wide = parts[0].dtype

    @jax.checkpoint
    def run(
        state: Array, begins: Array, part: tuple[Array, ...]
    ) -> tuple[Array, Array]:
        """Run a span from a state; return the state after it and the outputs (B, t, ...). Documents reset the state."""

        def one(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
            is_first, *values = token
            return step(jnp.where(is_first, 0, state), values)

        state = varying_like(state.astype(wide), begins, *part)
        state, outs = lax.scan(one, state, (begins, *(x.swapaxes(0, 1) for x in part)))
        return state, outs.swapaxes(0, 1)

    maps: list[Array] = []
    states: list[Array] = []
    for place in range(len(begins)):
        part = tuple(x[place] for x in parts)
        start = jnp.zeros((batch, *shape)) if begun is None else begun(batch)
        end, _ = run(start, begins[place], part)
        a, b = map_of(end, begins[place], part)
        maps.append(a)
        states.append(b)
    taken = scan_states(
        jnp.stack(maps),
        jnp.stack(states),
        layout=split,
        axis_name=axis_name,
        is_matrix=is_matrix,
    )
    outs = [
        run(taken[place], begins[place], tuple(x[place] for x in parts))[1]
        for place in range(len(begins))
    ]
    return _joined(jnp.stack(outs)).astype(dtype)


def _wide(x: Array) -> Array:
    return x.astype(accumulation_dtype(x.dtype))


def _layout_of(layout: LayoutName | Layout, axis_name: str, tokens: int) -> Layout:
    ranks = lax.axis_size(axis_name)
    split, _ = find_layouts(
        layout, None, ranks, tokens, tokens, remedy="ringspan.jax.shard"
    )
    spans_of(split)
    return split


def _in_spans(x: Array, layout: Layout, axis_name: str) -> Array:
    """Split (B, T, ...) into (n, B, t, ...), zeroed past the sequence: 0 times NaN would be NaN in a gradient."""
    if layout.padded_length > layout.length:
        is_token = (layout.permutation < layout.length).reshape(layout.ranks, -1)
        mine = jnp.asarray(is_token)[lax.axis_index(axis_name)]
        x = jnp.where(mine.reshape(-1, *[1] * (x.ndim - 2)), x, 0)
    spans = len(spans_of(layout)) // layout.ranks
    return jnp.stack(jnp.split(x, spans, 1))


def _joined(parts: Array) -> Array:
    return jnp.concatenate(list(parts), 1)


def _ages(layout: Layout, starts: Starts) -> Array:
    """Return each token's position within its document (N, n, t)."""
    begins = np.asarray(starts, np.int64)
    if (
        begins.ndim != 1
        or not len(begins)
        or begins[0] != 0
        or (np.diff(begins) <= 0).any()
    ):
        raise UnsupportedError(
            f"starts must be positions in increasing order, 0 the first, got {tuple(starts)}"
        )
    if begins[-1] >= layout.length:
        raise LayoutError(
            f"a document begins at {begins[-1]}, the layout has {layout.length} tokens, it must begin before"
        )
    positions = layout.permutation
    ages = positions - begins[np.searchsorted(begins, positions, side="right") - 1]
    spans = len(spans_of(layout)) // layout.ranks
    return jnp.asarray(ages.reshape(layout.ranks, spans, -1).astype(np.int32))


def _check(arrays: dict[str, Array], dims: int, *, heads: int | None = None) -> None:
    """Raise UnsupportedError unless arrays agree in batch, tokens and, in dimension ``heads``, heads."""
    first, reference = next(iter(arrays.items()))
    for name, x in arrays.items():
        alike = x.ndim >= 2 and x.shape[:2] == reference.shape[:2]
        if (
            not alike
            or x.ndim < min(dims, reference.ndim)
            or (heads and x.shape[heads] != reference.shape[heads])
        ):
            raise UnsupportedError(
                f"shapes do not fit: {first} {tuple(reference.shape)}, {name} {tuple(x.shape)}; sequences, tokens and "
                "heads must be as many"
            )


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
    return tuple(
        Span(int(i) // chunks, int(i) % chunks) for i in np.argsort(first, axis=None)
    )


def scan_states(
    maps: Array,
    states: Array,
    *,
    layout: Layout,
    axis_name: str = "sp",
    is_matrix: bool = False,
) -> Array:
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
        # A round sends the values from before it.
        before = (
            list(prefix_maps),
            list(prefixes),
        )
        moves: dict[tuple[int, int, bool, bool, bool], list[tuple[int, int]]] = {}
        for message in messages:
            (sender, out), (receiver, into) = (
                spans[message.source],
                spans[message.target],
            )
            kind = out, into, message.has_map, message.composes, message.is_state
            moves.setdefault(kind, []).append((sender, receiver))
        for (out, into, has_map, composes, is_state), pairs in moves.items():
            arrived = lax.ppermute(before[1][out], axis_name, pairs)
            receives = _is_one_of(
                rank, [receiver for _, receiver in pairs], layout.ranks
            )
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
    # If spans are shorter than ``width``, the tokens come from several of them.
    parts: list[Array] = []
    for reach in range(1, -(-width // tokens) + 1):
        count = min(tokens, width - (reach - 1) * tokens)
        tails = x[:, :, tokens - count :]
        halo = [jnp.zeros_like(tail) for tail in tails]
        moves: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for source, target in zip(spans, spans[reach:], strict=False):
            moves.setdefault((source.place, target.place), []).append(
                (source.rank, target.rank)
            )
        for (out, into), pairs in moves.items():
            arrived = lax.ppermute(tails[out], axis_name, pairs)
            halo[into] = jnp.where(
                _is_one_of(rank, [r for _, r in pairs], layout.ranks),
                arrived,
                halo[into],
            )
        parts.append(jnp.stack(halo))
    return jnp.concatenate(parts[::-1], 2)


def _is_one_of(rank: Array, ranks: list[int], count: int) -> Array:
    table = np.zeros(count, np.bool_)
    table[ranks] = True
    return jnp.asarray(table)[rank]

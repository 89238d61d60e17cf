"""Attention of a block of queries to a block of keys, chunk pair by chunk pair, in plain XLA (FlashAttention).

One chunk pair's scores exist at a time, of one key/value head on CPU (in the cache), of all elsewhere (large launches).
F key/value heads of the batch (B x G), P query heads that share one, T query tokens, T' keys, D head size, E value head
size, r = P x chunk rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, Final, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from ringspan.jax.program import Course, Program

_Sums = TypeVar("_Sums")
_Rows = TypeVar("_Rows")

_LINE: Final = 64  # bytes
# The maximum of a row that has seen no key: finite, so that the difference of two is not NaN.
LOWEST: Final = -1e30


class State(NamedTuple):
    """Running partial of some queries: ``out = total / sum``, ``lse = top + log(sum)``. In float32 or float64."""

    total: Array  # (F, P, T, E)
    top: Array  # (F, P, T)
    sum: Array  # (F, P, T)


class QueryRows(NamedTuple):
    """A chunk of queries in backward. ``lse`` is the GLOBAL one, ``delta = sum(dout out)``; both (r,)."""

    q: Array  # (r, D)
    dout: Array  # (r, E)
    lse: Array
    delta: Array


class Gradients(NamedTuple):
    dq: Array  # (F, P, T, D); while a chunk is computed only its rows, transposed: (D, r)
    dk: Array  # (F, T', D)
    dv: Array  # (F, T', E)


class Work(NamedTuple):
    num_runs: Array
    runs: Array
    num_partial: Array
    partial: Array


@dataclass(frozen=True)
class Kernel(ABC):
    """Block computation for the rank and hop of ``row``: ``scores = scale q k^T``, or ``cap tanh(scores / cap)``."""

    program: Course
    scale: float
    softcap: float | None

    def start(self, rows: tuple[int, ...], size: int, dtype: DTypeLike) -> Any:
        """Return the state of queries (F, P, T) that have seen no key; values have ``size`` E."""
        return State(
            jnp.zeros((*rows, size), dtype),
            jnp.full(rows, LOWEST, dtype),
            jnp.zeros(rows, dtype),
        )

    @abstractmethod
    def forward(self, row: Array, q: Array, block: Array, state: Any) -> Any:
        """Add the keys of a ``packed`` block to ``state``. q (F, P, T, D)."""

    def finish(self, state: Any) -> tuple[Array, Array]:
        """Return out (F, P, T, E), and lse (F, P, T), -inf if a row has seen no key."""
        seen = state.sum > 0
        total = jnp.where(seen, state.sum, 1)
        return state.total / total[..., None], jnp.where(
            seen, state.top + jnp.log(total), -jnp.inf
        )

    @abstractmethod
    def backward(
        self,
        row: Array,
        q: Array,
        block: Array,
        dout: Array,
        lse: Array,
        delta: Array,
        dq: Array,
    ) -> Gradients:
        """Return dq with the block's part added, and its dk, dv; lse (+inf if no key), delta GLOBAL, (F, P, T)."""

    def row(self, rank: Array, hop: Array | int) -> Array:
        return jnp.asarray(self.program.which)[rank, hop]

    def scores(self, products: Array) -> tuple[Array, Array | float]:
        """Return scores from ``q k^T``, and a score's derivative by its product."""
        if self.softcap is None:
            return products * self.scale, self.scale
        bent = jnp.tanh(products * (self.scale / self.softcap))
        return bent * self.softcap, (1 - bent * bent) * self.scale


@dataclass(frozen=True)
class XlaKernel(Kernel):
    program: Program

    def forward(self, row: Array, q: Array, block: Array, state: State) -> State:
        return _over_heads(
            partial(self._forward_head, self._work(row)), (q, block), state
        )

    def backward(
        self,
        row: Array,
        q: Array,
        block: Array,
        dout: Array,
        lse: Array,
        delta: Array,
        dq: Array,
    ) -> Gradients:
        k, v = parted(block, q.shape[-1], dout.shape[-1])
        zeros = (varying_like(jnp.zeros(x.shape, lse.dtype), dq) for x in (k, v))
        arrays = q, block, _columns(k), dout, lse, delta
        return _over_heads(
            partial(self._backward_head, self._work(row)), arrays, Gradients(dq, *zeros)
        )

    def _work(self, row: Array) -> Work:
        program = self.program
        lists = (program.num_runs, program.runs, program.num_partial, program.partial)
        return Work(*(jnp.asarray(x)[row] for x in lists))

    def _forward_head(
        self, work: Work, head: Array, q: Array, block: Array, state: State
    ) -> State:
        """Add one head's keys to the running state, for each chunk pair of the work, with FlashAttention's recurrence.

        ``enter`` cuts out a chunk of queries and its state, ``visit`` adds a chunk of keys, and ``leave`` puts the
        state back.
        """
        queries, keys = self.program.query_size, self.program.key_size
        sizes = q.shape[-1], state.total.shape[-1]

        def visit(
            rows: Array,
            key: Array,
            part: State,
            query: Array | None,
            bands: tuple[Array, Array],
        ) -> State:
            """Add a chunk of keys to a chunk of queries' state: (top, sum, total) as in ``State``.

            ``top' = max(top, scores)``; sum and total so far are multiplied by ``exp(top - top')``, the new ones have
            ``p = exp(scores - top')``. Without ``query`` all pairs are allowed, else ``bands`` say which.
            """
            k_chunk, v_chunk = _cut(block, head, key, keys, sizes)
            products = _dot(rows, k_chunk, ((1,), (1,)), part.top.dtype)
            scores, _ = self.scores(products)
            if query is None:
                # Scores are monotonic in products, so the highest score comes from the highest (or lowest) product.
                highest = self.scores(
                    products.max(-1) if self.scale >= 0 else products.min(-1)
                )[0]
            else:
                allowed = self._allowed(query, key, *bands)
                scores = jnp.where(
                    allowed, scores.reshape(-1, queries, keys), -jnp.inf
                ).reshape(scores.shape)
                highest = scores.max(-1)
            top = jnp.maximum(part.top, highest)
            p = jnp.exp(scores - top[:, None])
            kept = jnp.exp(part.top - top)
            added = _dot(p.astype(q.dtype), v_chunk, ((1,), (0,)), part.top.dtype)
            return State(
                part.total * kept[:, None] + added, top, part.sum * kept + p.sum(-1)
            )

        def enter(query: Array, state: State) -> tuple[Array, State]:
            return _cut_rows(q, head, query, queries), State(
                *(_cut_rows(x, head, query, queries) for x in state)
            )

        def leave(query: Array, state: State, part: State) -> State:
            return State(
                *(
                    _put_rows(x, y, head, query, queries)
                    for x, y in zip(state, part, strict=True)
                )
            )

        return self._over_pairs(work, state, enter, visit, leave)

    def _backward_head(
        self,
        work: Work,
        head: Array,
        q: Array,
        block: Array,
        columns: Array | None,
        dout: Array,
        lse: Array,
        delta: Array,
        sums: Gradients,
    ) -> Gradients:
        """Add one head's dq, dk and dv for each chunk pair of the work, recomputing probabilities from the GLOBAL lse.

        ``enter`` cuts out the rows of a chunk of queries, with dq transposed to (D, r), and ``leave`` puts dq back.
        """
        queries, keys = self.program.query_size, self.program.key_size
        sizes, dtype = (q.shape[-1], dout.shape[-1]), lse.dtype

        def visit(
            rows: QueryRows,
            key: Array,
            sums: Gradients,
            query: Array | None,
            bands: tuple[Array, Array],
        ) -> Gradients:
            """Add a chunk pair's gradients; scores are keys x queries, (c', r).

            ``p = exp(scores - lse)``, ``ds = p (v dout^T - delta) slope``, ``dq^T += k^T ds``, ``dk += ds q``, ``dv +=
            p dout``, where ``slope`` is the derivative of a score by ``k q^T``.
            """
            k_chunk, v_chunk = _cut(block, head, key, keys, sizes)
            scores, slope = self.scores(_dot(k_chunk, rows.q, ((1,), (1,)), dtype))
            if query is not None:
                allowed = self._allowed(query, key, *bands, keys_first=True)[:, None]
                scores = jnp.where(
                    allowed, scores.reshape(keys, -1, queries), -jnp.inf
                ).reshape(scores.shape)
            p = jnp.exp(scores - rows.lse)
            ds = (
                p * (_dot(v_chunk, rows.dout, ((1,), (1,)), dtype) - rows.delta) * slope
            )
            ds = ds.astype(q.dtype)
            dk, dv = (
                _dot(ds, rows.q, ((1,), (0,)), dtype),
                _dot(p.astype(q.dtype), rows.dout, ((1,), (0,)), dtype),
            )
            if columns is None:
                dq = _dot(k_chunk, ds, ((0,), (0,)), dtype)
            else:
                k_columns = lax.dynamic_slice(
                    columns, _at(head, 0, key), (1, sizes[0], keys)
                )[0]
                dq = _dot(k_columns, ds, ((1,), (0,)), dtype)
            return Gradients(
                sums.dq + dq, _add(sums.dk, dk, head, key), _add(sums.dv, dv, head, key)
            )

        def enter(query: Array, sums: Gradients) -> tuple[QueryRows, Gradients]:
            rows = QueryRows(
                *(_cut_rows(x, head, query, queries) for x in (q, dout, lse, delta))
            )
            return rows, sums._replace(dq=_cut_rows(sums.dq, head, query, queries).T)

        def leave(query: Array, sums: Gradients, part: Gradients) -> Gradients:
            return part._replace(dq=_put_rows(sums.dq, part.dq.T, head, query, queries))

        return self._over_pairs(work, sums, enter, visit, leave)

    def _over_pairs(
        self,
        work: Work,
        sums: _Sums,
        enter: Callable[[Array, _Sums], tuple[_Rows, _Sums]],
        visit: Callable[
            [_Rows, Array, _Sums, Array | None, tuple[Array, Array]], _Sums
        ],
        leave: Callable[[Array, _Sums, _Sums], _Sums],
    ) -> _Sums:
        """Visit all chunk pairs: runs of whole pairs, which share a chunk of queries, then pairs that bands cut."""

        def run(n: Array, sums: _Sums) -> _Sums:
            query, first, count = work.runs[n]
            rows, part = enter(query, sums)
            none = (first, first)
            size = self.program.key_size
            part = _loop(
                count,
                lambda c, part: visit(rows, first + c * size, part, None, none),
                part,
            )
            return leave(query, sums, part)

        def cut_pair(n: Array, sums: _Sums) -> _Sums:
            query, key, *bands = work.partial[n]
            rows, part = enter(query, sums)
            return leave(
                query, sums, visit(rows, key, part, query, (bands[0], bands[1]))
            )

        return _loop(work.num_partial, cut_pair, _loop(work.num_runs, run, sums))

    def _allowed(
        self,
        query: Array,
        key: Array,
        first: Array,
        count: Array,
        *,
        keys_first: bool = False,
    ) -> Array:
        """Return a chunk pair's allowed pairs. bool (query chunk, key chunk), or keys first."""
        row = query + jnp.arange(self.program.query_size, dtype=jnp.int32)
        column = key + jnp.arange(self.program.key_size, dtype=jnp.int32)
        row, column = (row, column[:, None]) if keys_first else (row[:, None], column)
        table = jnp.asarray(self.program.bands)

        def inside(n: Array) -> Array:
            q0, q1, k0, k1, lo, hi = table[n]
            first = jnp.where((row >= q0) & (row < q1), jnp.maximum(row - hi, k0), k1)
            return (column >= first) & (column < jnp.minimum(row - lo + 1, k1))

        return _loop(
            count - 1, lambda n, seen: seen | inside(first + 1 + n), inside(first)
        )


def accumulation_dtype(dtype: DTypeLike) -> DTypeLike:
    """Return float64 for float64 inputs, else float32."""
    return jnp.promote_types(dtype, jnp.float32)


def varying_like(x: Array, *others: Array) -> Array:
    """Make ``x`` vary along the mesh axes along which ``shard_map`` knows another to differ."""
    axes = frozenset[str]().union(*map(varying_axes, others)) - varying_axes(x)
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def varying_axes(x: Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def _over_heads(
    one_head: Callable[..., _Sums], inputs: tuple[Any, ...], sums: _Sums
) -> _Sums:
    """Run ``one_head(head, *inputs, sums)`` for each head: in turn and in place on CPU, else all at once."""
    if jax.default_backend() == "cpu":
        return lax.fori_loop(
            0, len(inputs[0]), lambda head, sums: one_head(head, *inputs, sums), sums
        )

    def alone(*arrays: object) -> _Sums:
        *inputs, sums = jax.tree.map(lambda x: x[None], arrays)
        return jax.tree.map(
            lambda x: x[0], one_head(jnp.zeros((), jnp.int32), *inputs, sums)
        )

    return jax.vmap(alone)(*inputs, sums)


def _columns(k: Array) -> Array | None:
    """Transpose keys (F, T', D) to (F, D, T' + padding) on CPU, where products are faster; else return None."""
    # Without an extra cache line per row, a power of two would map a chunk's rows to the same cache sets.
    on_cpu = jax.default_backend() == "cpu"
    return (
        jnp.pad(k.swapaxes(1, 2), ((0, 0), (0, 0), (0, _LINE // k.dtype.itemsize)))
        if on_cpu
        else None
    )


def _loop(count: Array, body: Callable[[Array, Any], Any], start: Any) -> Any:
    return lax.fori_loop(jnp.zeros((), count.dtype), count, body, start)


def _dot(
    a: Array, b: Array, contracting: tuple[tuple[int], tuple[int]], dtype: DTypeLike
) -> Array:
    """Multiply with accumulation, on every device, in the precision of the dtypes."""
    return lax.dot_general(
        a,
        b,
        (contracting, ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )


def packed(k: Array, v: Array) -> Array:
    """Pack keys (F, T', D) and values (F, T', E) in rows of a width dividing D and E: neighbours stay adjacent."""
    width = gcd(k.shape[-1], v.shape[-1])
    return jnp.concatenate([x.reshape(x.shape[0], -1, width) for x in (k, v)], 1)


def parted(block: Array, *sizes: int) -> tuple[Array, Array]:
    """Split a packed block into keys and values of sizes D and E."""
    k, v = jnp.split(block, [_rows_of_keys(block, sizes)], 1)
    return k.reshape(len(k), -1, sizes[0]), v.reshape(len(v), -1, sizes[1])


def _rows_of_keys(block: Array, sizes: tuple[int, ...]) -> int:
    return block.shape[1] * sizes[0] // sum(sizes)


def _cut(
    block: Array, head: Array, start: Array, size: int, sizes: tuple[int, int]
) -> tuple[Array, Array]:
    """Cut chunks of keys (c', D) and values (c', E) of a head out of a packed block."""
    width = block.shape[2]
    k, v = (
        lax.dynamic_slice(
            block,
            _at(head, first + start * (n // width), 0),
            (1, size * n // width, width),
        )
        for first, n in zip((0, _rows_of_keys(block, sizes)), sizes, strict=True)
    )
    return k.reshape(size, -1), v.reshape(size, -1)


def _add(x: Array, part: Array, head: Array, row: Array) -> Array:
    corner = _at(head, row, 0)
    return lax.dynamic_update_slice(
        x, lax.dynamic_slice(x, corner, (1, *part.shape)) + part, corner
    )


def _cut_rows(x: Array, head: Array, start: Array, size: int) -> Array:
    """Return a head's tokens of (F, P, T, ...) as rows: (P x size, ...)."""
    _, shared, _, *rest = x.shape
    return lax.dynamic_slice(
        x, _at(head, 0, start, *(0 for _ in rest)), (1, shared, size, *rest)
    ).reshape(-1, *rest)


def _put_rows(x: Array, rows: Array, head: Array, start: Array, size: int) -> Array:
    _, shared, _, *rest = x.shape
    return lax.dynamic_update_slice(
        x, rows.reshape(1, shared, size, *rest), _at(head, 0, start, *(0 for _ in rest))
    )


def _at(*corner: Array | int) -> tuple[Array, ...]:
    return tuple(jnp.asarray(n, jnp.int32) for n in corner)

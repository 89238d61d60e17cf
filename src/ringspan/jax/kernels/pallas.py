"""Attention of a block of queries to a block of keys as Pallas kernels for TPUs, interpreted on CPU.

The grid goes through heads and, for each, chunk pairs; a chunk of queries (for dk and dv: of keys) stays in vector
memory while its pairs last. Scores are keys x queries: a query's maximum, sum, lse and delta lie along lanes. Names as
in ``xla``; c = chunk of queries, c' = chunk of keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from ringspan.core.errors import UnsupportedError
from ringspan.jax.kernels.xla import Gradients, Kernel, State, parted, varying_like
from ringspan.jax.program import IntArray, Pairs, Program, key_of, query_of

_LANES: Final = 128  # a chunk of queries fills whole rows of a vector register
_SUBLANES: Final = 16  # a chunk of keys fills whole columns, in bfloat16
_GRID: Final = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))


@dataclass(frozen=True)
class PallasKernel(Kernel):
    program: Program
    pairs: Pairs

    def forward(self, row: Array, q: Array, block: Array, state: State) -> State:
        k, v = parted(block, q.shape[-1], state.total.shape[-1])
        total = pltpu.VMEM(
            (q.shape[1], v.shape[-1], self.program.query_size), state.total.dtype
        )
        return State(
            *self._call(
                _forward,
                row,
                self.pairs.by_query,
                "qkkqqq",
                (q, k, v, *state),
                3,
                total,
            )
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
        """Return dq with the block's part added, and its dk and dv, by two kernels over the same chunk pairs.

        dq is summed over the keys of a chunk of queries, dk and dv over the queries of a chunk of keys: each kernel
        goes through the pairs in the order that keeps its sums in vector memory.
        """
        k, v = parted(block, q.shape[-1], dout.shape[-1])
        arrays = q, k, v, dout, lse, delta
        (dq,) = self._call(
            _backward_queries, row, self.pairs.by_query, "qkkqqqq", (*arrays, dq), 1
        )
        zeros = [varying_like(jnp.zeros(x.shape, lse.dtype), dq) for x in (k, v)]
        return Gradients(
            dq,
            *self._call(
                _backward_keys, row, self.pairs.by_key, "qkkqqqkk", (*arrays, *zeros), 2
            ),
        )

    def _call(
        self,
        body: Callable[..., None],
        row: Array,
        table: IntArray,
        kinds: str,
        arrays: tuple[Array, ...],
        updated: int,
        *scratch: Any,
    ) -> list[Array]:
        """Run ``body(pair, *references)`` per table row; return the last ``updated`` arrays, changed in place."""
        # ``kinds`` has a letter for each array: q if it is cut in chunks of queries, k if in chunks of keys.
        num_pairs, pairs = (
            jnp.asarray(x)[row].reshape(-1) for x in (self.pairs.num, table)
        )
        lists, bands = (
            jnp.asarray(x).reshape(-1) for x in (self.pairs.lists, self.program.bands)
        )
        tables = num_pairs, pairs, lists, bands
        specs = [
            _spec(kind, x, self.program) for kind, x in zip(kinds, arrays, strict=True)
        ]
        results = arrays[-updated:]

        def run(*references: Any) -> None:
            step, last, shared = (
                pl.program_id(1),
                pl.num_programs(1) - 1,
                arrays[0].shape[1],
            )
            pair = _Pair(
                self, *references[: len(tables)], step=step, last=last, shared=shared
            )
            body(pair, *references[len(tables) :])

        return pl.pallas_call(
            run,
            [
                jax.ShapeDtypeStruct(
                    x.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type
                )
                for x in results
            ],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(tables),
                grid=(len(arrays[0]), len(pairs) // 2),
                in_specs=specs,
                out_specs=specs[-updated:],
                scratch_shapes=scratch,
            ),
            input_output_aliases={
                len(tables) + len(arrays) - updated + n: n for n in range(updated)
            },
            compiler_params=_GRID,
            interpret=is_interpreted(),
            name=body.__name__.strip("_"),
        )(*tables, *arrays)


@dataclass(frozen=True)
class _Pair:
    """Chunk pair of a step of the grid, and its neighbours in the list."""

    kernel: PallasKernel
    num_pairs: Any  # references to the tables, in scalar memory
    pairs: Any
    lists: Any
    bands: Any
    step: Any  # step of the grid, and so the place in the list
    last: Any
    shared: int  # P

    def changes(self, bits: Callable[[Any], Any]) -> tuple[Array, Array]:
        """Return whether this is the first, and the last, pair in a row with its chunk of queries, or of keys."""
        step, last = self.step, self.last
        here, before, behind = (
            bits(self.pairs[2 * n])
            for n in (step, jnp.maximum(step - 1, 0), jnp.minimum(step + 1, last))
        )
        return (step == 0) | (here != before), (step == last) | (here != behind)

    def compute(self, one: Callable[[int, Array | None], None]) -> None:
        """Run ``one(head, allowed)`` per query head of a key, within the list; ``allowed`` is None for a whole pair."""
        cut, is_listed = self.pairs[2 * self.step + 1], self.step < self.num_pairs[0]

        def heads(allowed: Array | None) -> None:
            for head in range(self.shared):
                one(head, allowed)

        pl.when(is_listed & (cut < 0))(lambda: heads(None))
        pl.when(is_listed & (cut >= 0))(lambda: heads(self._allowed(cut)))

    def _allowed(self, cut: Array) -> Array:
        """Return the pairs that any of the bands allows. bool (c', c)."""
        program, where = self.kernel.program, self.pairs[2 * self.step]
        shape = program.key_size, program.query_size
        column = key_of(where) * program.key_size + lax.broadcasted_iota(
            jnp.int32, shape, 0
        )
        row = query_of(where) * program.query_size + lax.broadcasted_iota(
            jnp.int32, shape, 1
        )
        first, count = self.lists[2 * cut], self.lists[2 * cut + 1]

        def inside(n: Array, seen: Array) -> Array:
            q0, q1, k0, k1, lo, hi = (self.bands[6 * (first + n) + i] for i in range(6))
            here = (row >= q0) & (row < q1) & (column >= k0) & (column < k1)
            here &= (row - column >= lo) & (row - column <= hi)
            return seen | here.astype(jnp.int32)

        return (
            lax.fori_loop(
                jnp.zeros_like(count), count, inside, jnp.zeros(shape, jnp.int32)
            )
            > 0
        )


def is_interpreted() -> bool:
    return jax.default_backend() == "cpu"


def check_chunks(program: Program) -> None:
    """Refuse chunks that overlap or, unless interpreted, do not fill registers."""
    queries, keys = program.query_size, program.key_size
    if not program.is_even:
        raise UnsupportedError(
            f"kernel='pallas': chunks of {queries} queries and {keys} keys do not divide a rank's tokens (in zigzag "
            "each half); pass query_chunk and key_chunk that do, or a longer layout"
        )
    if not is_interpreted() and (queries % _LANES or keys % _SUBLANES):
        raise UnsupportedError(
            f"kernel='pallas': a TPU needs chunks of a multiple of {_LANES} queries and {_SUBLANES} keys, these have "
            f"{queries} and {keys}; pass query_chunk and key_chunk"
        )


def _forward(
    pair: _Pair, q, k, v, total_in, top_in, sum_in, total, top, sum_, sums
) -> None:
    """Run a step of FlashAttention's recurrence; the unnormalised result is (E, c), like the scores."""
    is_first, is_last = pair.changes(query_of)

    @pl.when(is_first)
    def start():
        top[...], sum_[...] = top_in[...], sum_in[...]
        for head in range(pair.shared):
            sums[head] = total_in[0, head].T

    def one(head: int, allowed: Array | None) -> None:
        """Add a chunk of keys to one head's running (top, sum, total), in FlashAttention's recurrence.

        With scores s: ``new = max(top, s)``, ``kept = exp(top - new)``, ``sum = kept sum + sum(exp(s - new))``, ``total
        = kept total + v^T exp(s - new)``.
        """
        scores, _ = pair.kernel.scores(_dot(k[0], q[0, head], 1, 1, sums.dtype))
        if allowed is not None:
            scores = jnp.where(allowed, scores, -jnp.inf)
        old = top[0, pl.ds(head, 1)]
        new = jnp.maximum(old, scores.max(0, keepdims=True))
        p, kept = jnp.exp(scores - new), jnp.exp(old - new)
        top[0, pl.ds(head, 1)] = new
        sum_[0, pl.ds(head, 1)] = sum_[0, pl.ds(head, 1)] * kept + p.sum(
            0, keepdims=True
        )
        sums[head] = sums[head] * kept + _dot(v[0], p.astype(v.dtype), 0, 0, sums.dtype)

    pair.compute(one)

    @pl.when(is_last)
    def finish():
        for head in range(pair.shared):
            total[0, head] = sums[head].T


def _backward_queries(pair: _Pair, q, k, v, dout, lse, delta, dq_in, dq) -> None:
    """dq = ds k."""
    is_first, _ = pair.changes(query_of)

    @pl.when(is_first)
    def start():
        dq[...] = dq_in[...]

    def one(head: int, allowed: Array | None) -> None:
        _, ds = _derivatives(pair, head, allowed, q, k, v, dout, lse, delta)
        dq[0, head] += _dot(ds, k[0], 0, 0, dq.dtype)

    pair.compute(one)


def _backward_keys(
    pair: _Pair, q, k, v, dout, lse, delta, dk_in, dv_in, dk, dv
) -> None:
    """dk = ds^T q, dv = p^T dout."""
    is_first, _ = pair.changes(key_of)

    @pl.when(is_first)
    def start():
        dk[...], dv[...] = dk_in[...], dv_in[...]

    def one(head: int, allowed: Array | None) -> None:
        p, ds = _derivatives(pair, head, allowed, q, k, v, dout, lse, delta)
        dk[0] += _dot(ds, q[0, head], 1, 0, dk.dtype)
        dv[0] += _dot(p, dout[0, head], 1, 0, dv.dtype)

    pair.compute(one)


def _derivatives(
    pair: _Pair, head: int, allowed: Array | None, q, k, v, dout, lse, delta
) -> tuple[Array, Array]:
    """Return probabilities, and the loss's derivatives by products of queries and keys; (c', c), in q's dtype."""
    scores, slope = pair.kernel.scores(_dot(k[0], q[0, head], 1, 1, lse.dtype))
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
    p = jnp.exp(scores - lse[0, pl.ds(head, 1)])
    dp = _dot(v[0], dout[0, head], 1, 1, lse.dtype)
    ds = p * (dp - delta[0, pl.ds(head, 1)]) * slope
    return p.astype(q.dtype), ds.astype(q.dtype)


def _spec(kind: str, x: Array, program: Program) -> pl.BlockSpec:
    """Specify an array's chunk for a step of the grid: (F, T', ...) by keys, (F, P, T, ...) by queries."""

    def index(
        head: Array, number: Any, num_pairs: Any, pairs: Any, lists: Any, bands: Any
    ) -> tuple[Any, ...]:
        where = pairs[2 * number]
        chunk = (0, query_of(where)) if kind == "q" else (key_of(where),)
        return (head, *chunk, 0)[: x.ndim]

    chunk = (x.shape[1], program.query_size) if kind == "q" else (program.key_size,)
    return pl.BlockSpec((1, *chunk, *x.shape[len(chunk) + 1 :]), index)


def _dot(a: Array, b: Array, over_a: int, over_b: int, dtype: DTypeLike) -> Array:
    # The TPU's compiler rejects HIGHEST for bfloat16, which has only one precision.
    precision = (
        lax.Precision.DEFAULT if a.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
    )
    contracted = ((over_a,), (over_b,)), ((), ())
    return lax.dot_general(
        a, b, contracted, precision=precision, preferred_element_type=dtype
    )

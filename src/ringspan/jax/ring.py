"""The only ring loop: carries out the program, in which layouts and masks are data.

Hop t: send block t + 1 on its way, compute on block t; XLA overlaps the two. Keys and values are one message; in
backward, dk and dv follow their block one hop later and end at its owner. Large blocks go one group of heads after the
other. B batch, H query heads, G key/value heads, P = H / G, F = B x G, T local tokens, D head size, E value head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.names import JaxKernelName
from ringspan.core.schedule.workspace import head_groups
from ringspan.jax.kernels.pallas import PallasKernel, check_chunks
from ringspan.jax.kernels.triton import TritonKernel
from ringspan.jax.kernels.xla import (
    Kernel,
    XlaKernel,
    accumulation_dtype,
    packed,
    parted,
    varying_like,
)
from ringspan.jax.program import compile_pairs, compile_program, compile_tables


@dataclass(frozen=True)
class Ring:
    """One attention of a ring: static and hashable, so that traces are shared."""

    axis_name: str
    layout: Layout
    key_layout: Layout
    mask: Mask
    scale: float
    softcap: float | None
    query_chunk: int
    key_chunk: int
    kernel_name: JaxKernelName = "xla"

    @property
    def kernel(self) -> Kernel:
        if self.kernel_name == "triton":
            return TritonKernel(
                compile_tables(self.layout, self.key_layout, self.mask),
                self.scale,
                self.softcap,
            )
        program = compile_program(
            self.layout, self.key_layout, self.mask, self.query_chunk, self.key_chunk
        )
        if self.kernel_name == "xla":
            return XlaKernel(program, self.scale, self.softcap)
        check_chunks(program)
        return PallasKernel(program, self.scale, self.softcap, compile_pairs(program))

    def head_groups(self, q: Array, k: Array) -> int:
        pairs, on_cpu = self.kernel.program.tile_pairs, jax.default_backend() == "cpu"
        return head_groups(
            q.shape[0] * q.shape[1], k.shape[1], self.layout.ranks, pairs, on_cpu=on_cpu
        )

    def shift(self, x: Array, hops: int) -> Array:
        ranks = self.layout.ranks
        step = self.kernel.program.direction * hops
        return lax.ppermute(
            x, self.axis_name, [(rank, (rank + step) % ranks) for rank in range(ranks)]
        )


def forward(
    ring: Ring, q: Array, k: Array, v: Array, sinks: Array | None
) -> tuple[Array, Array]:
    """Return attention of q (B, H, T, D) to all k and v (B, G, T', D or E): out (B, H, T, E), float32 lse (B, H, T)."""
    return _by_heads(
        partial(_forward_of_heads, ring), ring.head_groups(q, k), (q, k, v), sinks
    )


def _forward_of_heads(
    ring: Ring, q: Array, k: Array, v: Array, sinks: Array | None
) -> tuple[Array, Array]:
    """Return out and lse of a group of heads, adding each block of keys and values as it comes round the ring.

    A sink is one more logit without a value: lse' = log(e^lse + e^sink), and out is scaled by e^(lse - lse').
    """
    kernel, dtype = ring.kernel, accumulation_dtype(q.dtype)
    rank = lax.axis_index(ring.axis_name)
    rows, keys_values = _rows(q, k), _packed(k, v)
    size = v.shape[-1]

    def compute(block: Array, state: object, hop: Array | int) -> Any:
        return _seen(ring, kernel.row(rank, hop), rows, block, state)

    def one_hop(block: Array, state: object, hop: Array) -> tuple[Array, Any]:
        # The transfer stands before the computation, so that XLA can start it first and end it last.
        arriving = ring.shift(block, 1)
        return arriving, compute(block, state, hop)

    state = jax.tree.map(
        lambda x: varying_like(x, rows, keys_values),
        kernel.start(rows.shape[:-1], size, dtype),
    )
    last = kernel.program.num_hops - 1
    block, state = _hops(one_hop, (keys_values, state), 0, last)
    state = compute(block, state, last)
    out, lse = kernel.finish(state)
    out, lse = out.reshape(*q.shape[:-1], size), lse.reshape(q.shape[:-1])
    if sinks is not None:
        with_sink = jnp.logaddexp(lse, sinks.astype(dtype)[:, None])
        # Without a key and a sink, out stays 0.
        share = jnp.where(jnp.isneginf(with_sink), 1, jnp.exp(lse - with_sink))
        out, lse = out * share[..., None], with_sink
    return out.astype(q.dtype), lse


def backward(
    ring: Ring,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    out: Array,
    lse: Array,
) -> tuple[Array, Array, Array, Array | None]:
    """Return dq, dk, dv, dsinks of the local tokens from the GLOBAL out and lse; summed and sent in float32."""
    heads = dout, q, k, v, out, lse
    return _by_heads(
        partial(_backward_of_heads, ring), ring.head_groups(q, k), heads, sinks
    )


def _backward_of_heads(
    ring: Ring,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    sinks: Array | None,
) -> tuple[Array, Array, Array, Array | None]:
    """Return dq, dk, dv and dsinks of a group of heads.

        block       k and v, which move one rank per hop, as in forward
        gradient    the block's dk and dv so far, which follow it one hop later
        dq          stays with its rank

    After the last hop a gradient goes straight to its owner. ``dsinks = -sum(e^(sink - lse) delta)``.
    """
    kernel, dtype = ring.kernel, accumulation_dtype(q.dtype)
    rank = lax.axis_index(ring.axis_name)
    # delta is the same for all hops, since the softmax's part of the gradient needs only whole rows.
    delta = jnp.einsum(
        "bhte,bhte->bht",
        dout.astype(dtype),
        out.astype(dtype),
        precision=lax.Precision.HIGHEST,
    )
    rows, dout_rows = _rows(q, k), _rows(dout, k)
    # A row without a key has lse -inf; with +inf instead its probabilities become 0, as they must.
    safe = jnp.where(jnp.isneginf(lse), jnp.inf, lse)
    lse_rows, delta_rows = (x.reshape(rows.shape[:-1]) for x in (safe, delta))
    keys_values = _packed(k, v)

    def compute(block: Array, dq: Array, hop: Array | int) -> tuple[Array, Array]:
        dq, *added = _differentiated(
            ring,
            kernel.row(rank, hop),
            rows,
            block,
            dout_rows,
            lse_rows,
            delta_rows,
            dq,
        )
        return dq, packed(*added)

    def one_hop(
        block: Array, behind: Array, dq: Array, hop: Array
    ) -> tuple[Array, Array, Array]:
        arriving, gradient = ring.shift(block, 1), ring.shift(behind, 1)
        dq, added = compute(block, dq, hop)
        return arriving, gradient + added, dq

    dq = varying_like(jnp.zeros(rows.shape, dtype), rows, keys_values)
    last = kernel.program.num_hops - 1
    # The loop leaves out the first hop, before which there is no gradient, and the last, which sends no block on.
    block = ring.shift(keys_values, 1) if last else keys_values
    dq, gradient = compute(keys_values, dq, 0)
    if last:
        block, gradient, dq = _hops(one_hop, (block, gradient, dq), 1, last)
        gradient = ring.shift(gradient, 1)
        dq, added = compute(block, dq, last)
        # Send it straight to its owner, back by the number of steps that the block has moved.
        gradient = ring.shift(gradient + added, -last)
    parts = zip(parted(gradient, k.shape[-1], v.shape[-1]), (k, v), strict=True)
    dk, dv = (part.reshape(like.shape).astype(like.dtype) for part, like in parts)
    dsinks = None
    if sinks is not None:
        # A row without keys and with a sink of -inf contributes nothing.
        base = jnp.where(jnp.isneginf(lse), 0, lse)
        # The probability of the sink.
        share = jnp.exp(sinks.astype(dtype)[:, None] - base)
        dsinks = -(share * delta).sum((0, 2)).astype(sinks.dtype)
    return dq.reshape(q.shape).astype(q.dtype), dk, dv, dsinks


# The next two are functions under ``jit``, so that JAX traces one kernel for all hops and layers.
@partial(jax.jit, static_argnums=0)
def _seen(ring: Ring, *arrays: Any) -> Any:
    return ring.kernel.forward(*arrays)


@partial(jax.jit, static_argnums=0)
def _differentiated(ring: Ring, *arrays: Any) -> Any:
    return ring.kernel.backward(*arrays)


def _by_heads(
    one_group: Callable[..., Any],
    groups: int,
    arrays: tuple[Array, ...],
    sinks: Array | None,
) -> Any:
    """Run ``one_group(*arrays, sinks)`` for groups of heads in turn; key/value heads stay with their queries."""
    # Heads are the second dimension of ``arrays`` and of results, and the only dimension of sinks and their gradient.
    if groups == 1:
        return one_group(*arrays, sinks)

    def axis(x: object) -> int:
        return min(x.ndim, 2) - 1

    def compute(number: Array | int) -> Any:
        def mine(x: Array) -> Array:
            size = x.shape[axis(x)] // groups
            return lax.dynamic_slice_in_dim(x, number * size, size, axis(x))

        return one_group(*jax.tree.map(mine, (*arrays, sinks)))

    def room(part: object) -> Array:
        shape = list(part.shape)
        shape[axis(part)] *= groups
        # ``shard_map`` tracks which arrays vary between ranks, and a loop's carry must not change in that.
        return varying_like(jnp.zeros(shape, part.dtype), *arrays)

    def turn(number: Array, results: object) -> Any:
        def put(whole: Array, part: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(
                whole, part, number * part.shape[axis(part)], axis(part)
            )

        return jax.tree.map(put, results, compute(number))

    # With ``lax.map`` XLA would copy all arrays to make groups their first dimension.
    return lax.fori_loop(
        0, groups, turn, jax.tree.map(room, jax.eval_shape(lambda: compute(0)))
    )


def _hops(
    one_hop: Callable[..., Any], carry: tuple[Any, ...], first: int, stop: int
) -> Any:
    # In unrolled code XLA would send all blocks at once, as they depend on no result, and hold all N of them.
    numbers = jnp.arange(first, stop)
    return (
        lax.scan(lambda carry, hop: (one_hop(*carry, hop), None), carry, numbers)[0]
        if first < stop
        else carry
    )


def _rows(x: Array, k: Array) -> Array:
    """Group query heads by key/value head: (B, H, T, D) -> (F, P, T, D)."""
    return x.reshape(k.shape[0] * k.shape[1], -1, *x.shape[2:])


def _packed(k: Array, v: Array) -> Array:
    return packed(*(x.reshape(-1, *x.shape[2:]) for x in (k, v)))

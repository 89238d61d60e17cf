"""Attention of a block of queries to a block of keys by ``ringspan.gpu``'s programs, through jax-triton.

A launch takes a block's tiles from the table of rank and hop; (out, lse) go in and out as separate arrays, which all
jax-triton versions support. Names as in ``xla``.
"""

from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ringspan.gpu.support import LARGEST_HEADS, interprets_triton, is_installed
from ringspan.jax.kernels.xla import Gradients, Kernel, parted, varying_like
from ringspan.jax.program import Tables


class Partial(NamedTuple):
    out: Array  # (F, P, T, E)
    lse: Array  # (F, P, T), -inf in a row that has seen no key


@dataclass(frozen=True)
class TritonKernel(Kernel):
    program: Tables

    def start(self, rows: tuple[int, ...], size: int, dtype: DTypeLike) -> Partial:
        return Partial(jnp.zeros((*rows, size), dtype), jnp.full(rows, -jnp.inf, dtype))

    def finish(self, state: Partial) -> tuple[Array, Array]:
        return state

    def forward(self, row: Array, q: Array, block: Array, state: Partial) -> Partial:
        # Keys (F, T', D) become a batch of F with one head each.
        k, v = (x[:, None] for x in parted(block, q.shape[-1], state.out.shape[-1]))
        return Partial(*self._launch("forward", row, (q, k, v, *state), q, v, 2))

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
        """Return dq with the block's part added, and its dk and dv, by a launch for dq and one for dk and dv."""
        k, v = (x[:, None] for x in parted(block, q.shape[-1], dout.shape[-1]))
        # The second dout is in the place of out, which is not read if delta is given.
        arrays = dout, q, k, v, dout, lse, delta, dq
        (dq,) = self._launch(
            "backward_queries",
            row,
            arrays,
            q,
            v,
            1,
            without_strides=delta,
            HAS_DELTA=True,
        )
        zeros = [varying_like(jnp.zeros(x.shape, lse.dtype), dq) for x in (k, v)]
        arrays = dout, q, k, v, lse, delta, *zeros
        dk, dv = self._launch(
            "backward_keys", row, arrays, q, v, 2, without_strides=delta
        )
        return Gradients(dq, dk[:, 0], dv[:, 0])

    def _launch(
        self,
        name: str,
        row: Array,
        arrays: tuple[Array, ...],
        q: Array,
        v: Array,
        updated: int,
        *,
        without_strides: Array | None = None,
        **options: Any,
    ) -> list[Array]:
        """Launch a program with all its arguments; return the last ``updated`` of ``arrays``, updated."""
        from jax_triton import triton_call

        from ringspan.gpu import tuning

        program, (heads, num_rows), num_keys = self.program, q.shape[1:3], v.shape[2]
        if name == "backward_keys":
            lists, block, programs = (
                (program.first_of_keys, program.which_of_keys),
                "KEYS",
                (num_keys, len(q)),
            )
            sizes = num_rows, num_keys, q.shape[-1], v.shape[-1]
        else:
            lists, block, programs = (
                (program.first_of_rows, program.which_of_rows),
                "ROWS",
                (num_rows, len(q) * heads),
            )
            sizes = num_rows, q.shape[-1], v.shape[-1]
        tables = [jnp.asarray(x)[row] for x in (program.tiles, *lists)]
        is_new = "out_type" in signature(triton_call).parameters
        # An older jax-triton would pass a Python float as float64.
        number = float if is_new else np.float32
        strides = [
            prod(x.shape[n + 1 :])
            for x in arrays
            if x is not without_strides
            for n in range(3)
        ]
        numbers = [
            heads,
            heads,
            *sizes,
            number(self.scale),
            number(self.softcap or 0),
            0,
            *strides,
        ]
        options |= tuning.options(
            q.shape[-1],
            v.shape[-1],
            is_float32=q.dtype == jnp.float32,
            has_cap=self.softcap is not None,
        )
        first = len(arrays) + 3 + len(tables)
        row_bytes = max(options["SIZE"], options["VALUE_SIZE"]) * q.dtype.itemsize
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[-updated:]]
        found = triton_call(
            *arrays,
            q,
            q,
            q,
            *tables,
            *numbers,
            kernel=_tuned(name, row_bytes, first, first + len(numbers)),
            **{"out_type" if is_new else "out_shape": results},
            grid=lambda meta: (-(-programs[0] // meta[block]), programs[1]),
            IN_PLACE=False,
            **options,
        )
        # jax-triton's results do not say along which mesh axes they vary.
        return [varying_like(x, q, v) for x in found]


def why_not(q: Array, v: Array) -> str | None:
    """Return why the programs cannot compute attention of these arrays here, or None."""
    if jax.default_backend() != "gpu" and not interprets_triton():
        return f"it is for GPUs, not for {jax.default_backend()}"
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    # AMD's capabilities begin with gfx, and have no such limit.
    if capability[:1].isdigit() and float(capability) < 8:
        return f"it needs compute capability 8.0, this device has {capability}"
    if not is_installed("jax_triton"):
        return "jax-triton is not installed (pip install jax-triton)"
    if q.dtype.name not in LARGEST_HEADS:
        return f"it computes bfloat16, float16 and float32, not {q.dtype}"
    size, largest = max(q.shape[-1], v.shape[-1]), LARGEST_HEADS[q.dtype.name]
    return (
        None
        if size <= largest
        else f"its heads have at most {largest} numbers in {q.dtype}, these have {size}"
    )


@lru_cache(maxsize=64)
def _tuned(name: str, row_bytes: int, first: int, stop: int) -> Any:
    """Tune a program's blocks for heads of this padded size, on first use; arguments [first, stop) are numbers."""
    import triton

    from ringspan.gpu import attention, tuning

    program = getattr(attention, name)
    if interprets_triton():
        return tuning.interpreted(program)
    blocks = getattr(tuning, name.upper())
    return triton.autotune(
        blocks.configs(row_bytes), key=program.arg_names[first:stop]
    )(program)

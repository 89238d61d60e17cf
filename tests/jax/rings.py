"""What the JAX tests share: meshes of virtual devices, and one compiled ring for many masks."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import ringspan as rs
from ringspan.core.names import JaxKernelName
from ringspan.jax import ring, sharded_ring_attention
from ringspan.jax.kernels.pallas import PallasKernel
from ringspan.jax.kernels.triton import TritonKernel
from ringspan.jax.kernels.xla import Kernel, XlaKernel
from ringspan.jax.program import (
    Pairs,
    Program,
    Tables,
    compile_pairs,
    compile_program,
    compile_tables,
)

SPLIT = P(None, None, "sp")


def mesh(**axes: int) -> Mesh:
    shape = tuple(axes.values())
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def shards(x: Any, layout: rs.Layout, padding: float = 0) -> np.ndarray:
    """Padded and in the order of the layout along dimension 2."""
    x = np.asarray(x)
    width = [
        (0, layout.padded_length - layout.length if dim == 2 else 0)
        for dim in range(x.ndim)
    ]
    return np.pad(x, width, constant_values=padding)[:, :, layout.permutation]


def in_order(x: Any, layout: rs.Layout) -> np.ndarray:
    return np.asarray(x)[:, :, layout.inverse[: layout.length]].astype(np.float64)


def attention_and_gradients(
    q, k, v, dout, layout: rs.Layout, mask: rs.Mask, key_layout=None, **options
):
    """out, dq, dk and dv in order, by the public function; sinks' gradient comes last if there are sinks.

    Padding is NaN, of which nothing may reach a token.
    """
    keys = key_layout or layout
    inputs = [
        shards(x, split, np.nan) for x, split in ((q, layout), (k, keys), (v, keys))
    ]
    sinks = options.pop("sinks", None)
    if sinks is not None:
        inputs.append(np.asarray(sinks))

    @jax.jit
    def both(dout, *inputs):
        def attention(q, k, v, sinks=None):
            geometry = {
                "mesh": mesh(sp=layout.ranks),
                "mask": mask,
                "layout": layout,
                "key_layout": key_layout,
            }
            return sharded_ring_attention(q, k, v, sinks=sinks, **geometry, **options)

        out, differentiate = jax.vjp(attention, *inputs)
        return out, *differentiate(dout)

    out, dq, dk, dv, *dsinks = both(shards(dout, layout, np.nan), *inputs)
    ordered = [
        in_order(out, layout),
        in_order(dq, layout),
        in_order(dk, keys),
        in_order(dv, keys),
    ]
    return ordered + [np.asarray(x, np.float64) for x in dsinks]


@dataclass(frozen=True)
class DataRing(ring.Ring):
    """A ring whose program is an argument of the compiled function, so that one compilation serves many masks."""

    program: Any = None
    pairs: Any = None

    @property
    def kernel(self) -> Kernel:
        if isinstance(self.program, Tables):
            return TritonKernel(self.program, self.scale, self.softcap)
        if self.pairs:
            return PallasKernel(self.program, self.scale, self.softcap, self.pairs)
        return XlaKernel(self.program, self.scale, self.softcap)


@cache
def _compiled(
    layout: rs.Layout,
    program_type: type[Program | Tables],
    static: tuple[Any, ...],
    kernel: JaxKernelName,
):
    """lse and what ``attention_and_gradients`` gives, for local shards and the arrays of a program and of its pairs."""

    def local(arrays, pairs, q, k, v, dout):
        program, given = (
            program_type(**dict(static), **arrays),
            Pairs(**pairs) if pairs else None,
        )
        data = DataRing(
            "sp",
            layout,
            layout,
            rs.full(),
            q.shape[-1] ** -0.5,
            None,
            0,
            0,
            kernel,
            program,
            given,
        )
        out, lse = ring.forward(data, q, k, v, None)
        return lse, out, *ring.backward(data, dout, q, k, v, None, out, lse)[:3]

    specs = {
        "in_specs": (P(), P(), *(SPLIT,) * 4),
        "out_specs": (SPLIT,) * 5,
        "check_vma": kernel != "pallas",
    }
    return jax.jit(jax.shard_map(local, mesh=mesh(sp=layout.ranks), **specs))


def by_data(
    q,
    k,
    v,
    dout,
    layout: rs.Layout,
    mask: rs.Mask,
    chunks: tuple[int, int],
    kernel: JaxKernelName = "xla",
):
    """lse, out, dq, dk and dv in order, by the ring loop, without compiling anew for each mask."""
    by_tiles = kernel == "triton"
    program = (
        compile_tables(layout, layout, mask)
        if by_tiles
        else compile_program(layout, layout, mask, *chunks)
    )
    arrays = {name: x for name, x in vars(program).items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in vars(program).items() if name not in arrays}
    static |= {
        "num_hops": layout.ranks,
        "tile_pairs": 0,
        "direction": program.direction if layout.ranks > 2 else 1,
    }
    arrays = {
        name: x if name == "which" else _grown(name, x) for name, x in arrays.items()
    }
    pairs = (
        {name: _grown(name, x) for name, x in vars(compile_pairs(program)).items()}
        if kernel == "pallas"
        else {}
    )
    # which one it is, only the tables know
    shape = rs.Layout("contiguous", layout.padded_length, layout.ranks)
    function = _compiled(shape, type(program), tuple(sorted(static.items())), kernel)
    results = function(arrays, pairs, *(shards(x, layout) for x in (q, k, v, dout)))
    return [in_order(x, layout) for x in results]


def _grown(name: str, table: np.ndarray) -> np.ndarray:
    """Padded to a size that all programs of small problems fit in; lists of pairs go on as they end."""
    sizes = {
        1: (64,),
        2: (64, 40) if "_of_" in name else (1500, table.shape[-1]),
        3: (64, 40, table.shape[-1]),
    }
    missing = [
        (0, size - have)
        for have, size in zip(table.shape, sizes[table.ndim], strict=True)
    ]
    return np.pad(table, missing, mode="edge")

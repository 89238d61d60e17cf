"""What the JAX tests share: meshes of virtual devices, and one compiled ring for many masks."""

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import ringspan as rs
from ringspan.jax import ring, sharded_ring_attention
from ringspan.jax.kernels import Kernel, XlaKernel
from ringspan.jax.pallas import PallasKernel
from ringspan.jax.program import Pairs, Program, compile_pairs, compile_program

SPLIT = P(None, None, "sp")
_TABLES = ("which", "num_runs", "runs", "num_partial", "partial", "bands")


def mesh(**axes: int) -> Mesh:
    """A mesh of the first virtual devices."""
    shape = tuple(axes.values())
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def shards(x: Any, layout: rs.Layout) -> np.ndarray:
    """Padded and in the order of the layout along dimension 2."""
    x = np.asarray(x)
    width = [(0, layout.padded_length - layout.length if dim == 2 else 0) for dim in range(x.ndim)]
    return np.pad(x, width)[:, :, layout.permutation]


def in_order(x: Any, layout: rs.Layout) -> np.ndarray:
    """The inverse of ``shards``."""
    return np.asarray(x)[:, :, layout.inverse[: layout.length]].astype(np.float64)


def attention_and_gradients(q, k, v, dout, layout: rs.Layout, mask: rs.Mask, key_layout=None, **options):
    """out, dq, dk and dv in order, by the public function; sinks' gradient comes last if there are sinks."""
    keys = key_layout or layout
    inputs = [shards(q, layout), shards(k, keys), shards(v, keys)]
    sinks = options.pop("sinks", None)
    if sinks is not None:
        inputs.append(np.asarray(sinks))

    @jax.jit
    def both(dout, *inputs):
        def attention(q, k, v, sinks=None):
            geometry = {"mesh": mesh(sp=layout.ranks), "mask": mask, "layout": layout, "key_layout": key_layout}
            return sharded_ring_attention(q, k, v, sinks=sinks, **geometry, **options)

        out, differentiate = jax.vjp(attention, *inputs)
        return out, *differentiate(dout)

    out, dq, dk, dv, *dsinks = both(shards(dout, layout), *inputs)
    ordered = [in_order(out, layout), in_order(dq, layout), in_order(dk, keys), in_order(dv, keys)]
    return ordered + [np.asarray(x, np.float64) for x in dsinks]


@dataclass(frozen=True)
class DataRing(ring.Ring):
    """A ring whose program is an argument of the compiled function, so that one compilation serves many masks."""

    program: Any = None
    pairs: Any = None

    @property
    def kernel(self) -> Kernel:
        if self.pairs:
            return PallasKernel(self.program, self.scale, self.softcap, self.pairs)
        return XlaKernel(self.program, self.scale, self.softcap)


@cache
def _compiled(layout: rs.Layout, direction: int, sizes: tuple[int, int, int], kernel: ring.KernelName):
    """lse and what ``attention_and_gradients`` gives, for local shards and the tables of a program."""
    ranks = layout.ranks

    def local(tables, q, k, v, dout):
        program = Program(direction, ranks, 0, sizes[1], sizes[2], *tables[: len(_TABLES)], True)
        pairs = Pairs(*tables[len(_TABLES) :]) if kernel == "pallas" else None
        data = DataRing("sp", layout, layout, rs.full(), q.shape[-1] ** -0.5, None, 0, 0, kernel, program, pairs)
        out, lse = ring.forward(data, q, k, v, None)
        return lse, out, *ring.backward(data, dout, q, k, v, None, out, lse)[:3]

    specs = {"in_specs": (P(), *(SPLIT,) * 4), "out_specs": (SPLIT,) * 5, "check_vma": kernel == "xla"}
    return jax.jit(jax.shard_map(local, mesh=mesh(sp=ranks), **specs))


def by_data(q, k, v, dout, layout: rs.Layout, mask: rs.Mask, chunks: tuple[int, int], kernel: ring.KernelName = "xla"):
    """lse, out, dq, dk and dv in order, by the ring loop, without compiling anew for each mask."""
    program = compile_program(layout, layout, mask, *chunks)
    tables = [getattr(program, name) for name in _TABLES]
    if kernel == "pallas":
        pairs = compile_pairs(program)
        tables += [getattr(pairs, field.name) for field in fields(pairs)]
    tables = [x if x.ndim == 2 and x.shape[1] == layout.ranks else _grown(x) for x in tables]
    shape = rs.Layout("contiguous", layout.padded_length, layout.ranks)  # which one it is, only the tables know
    direction = program.direction if layout.ranks > 2 else 1
    function = _compiled(shape, direction, (layout.tokens_per_rank, program.query_size, program.key_size), kernel)
    results = function(tables, *(shards(x, layout) for x in (q, k, v, dout)))
    return [in_order(x, layout) for x in results]


def _grown(table: np.ndarray) -> np.ndarray:
    """Padded to a size that all programs of small problems fit in; lists of pairs go on as they end."""
    sizes = {1: (64,), 2: (1500, table.shape[-1]), 3: (64, 40, table.shape[-1])}[table.ndim]
    assert all(have <= size for have, size in zip(table.shape, sizes, strict=True)), table.shape
    return np.pad(table, [(0, size - have) for have, size in zip(table.shape, sizes, strict=True)], mode="edge")

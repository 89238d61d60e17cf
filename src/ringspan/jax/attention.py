"""The JAX back end's one public attention."""

from functools import lru_cache, partial
from math import prod
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringspan.core.arguments import check_scores, check_shapes, find_layouts, find_mask
from ringspan.core.errors import LayoutError, UnsupportedError
from ringspan.core.geometry.layout import CustomLayout, Layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.messages.numbers import described, integer
from ringspan.core.names import JAX_KERNEL_NAMES, JaxKernelName, LayoutName, find_name
from ringspan.jax import ring
from ringspan.jax.kernels import triton
from ringspan.jax.kernels.pallas import is_interpreted
from ringspan.jax.kernels.xla import varying_axes, varying_like
from ringspan.jax.mesh import check_mesh

SAVED_NAME: Final = "ring_attention"  # what activation checkpointing calls out and lse

_DTYPES: Final = ("float32", "float64", "bfloat16", "float16")


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    axis_name: str = "sp",
    mask: Mask | str | None = None,
    layout: LayoutName | Layout = "zigzag",
    key_layout: Layout | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    query_chunk: int = 256,
    key_chunk: int = 256,
    kernel: JaxKernelName = "xla",
) -> Array:
    """Exact attention of the local queries to the keys of all ranks, inside ``shard_map``; differentiable in reverse.

    On the gathered arrays: ``softmax(scale q k^T where mask allows) v``; a query that may see nothing gives 0. ``jit``,
    ``vmap``, ``checkpoint`` and ``scan`` compose; ``jax.checkpoint_policies.save_only_these_names("ring_attention")``
    recomputes a layer without its attention. Values past the layout's length, NaN too, change no result and no
    gradient. B batch, H query heads, G key/value heads, T local tokens, D head size, E value head size.

    Args:
        q: local queries (B, H, T, D), in the layout's order. float32, bfloat16, float16, or float64 with x64.
        k: local keys (B, G, T', D), G dividing H; they travel unrepeated.
        v: local values (B, G, T', E).
        axis_name: the mesh axis that splits the sequence: the ring.
        mask: allowed pairs of global positions; causal when None. Text is read by ``Mask.parse``.
        layout: the split of positions. A name means N x T tokens; pass a ``Layout`` for an end of padding.
        key_layout: the keys', if another sequence's (cross-attention).
        scale: factor on the scores; ``D ** -0.5`` when None.
        softcap: scores become ``softcap tanh(scores / softcap)`` (Gemma 2), unless None.
        sinks: a learnt score per query head (H,), which takes probability and has no value (gpt-oss).
        query_chunk: most local queries whose scores exist at once, for one head on CPU.
        key_chunk: most local keys whose scores exist at once.
        kernel: ``xla`` on any device; ``pallas`` on TPUs (interpreted on CPU, for tests), for float32 and bfloat16,
            whose chunks must divide a rank's tokens; ``triton`` on GPUs with jax-triton, for float32 and half
            precision, any tokens, no chunks, no ``vmap``.

    Returns:
        The local part of the result (B, H, T, E), in q's dtype.

    Raises:
        UnsupportedError: shapes, dtypes or options that this cannot run; while tracing, so before any communication.
        LayoutError: local arrays that do not fit the layout, or are the same on all ranks.

    Source: Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".
    """
    _check_arrays(q, k, v, sinks)
    _check_options(scale, softcap, query_chunk, key_chunk)
    _check_kernel(kernel, q, v)
    ranks = _axis_size(axis_name)
    layout, key_layout = find_layouts(
        layout, key_layout, ranks, q.shape[2], k.shape[2], remedy="ringspan.jax.shard"
    )
    if isinstance(layout, CustomLayout):
        raise UnsupportedError(
            "a layout of any runs of positions is not supported in JAX, where one program serves all ranks; use "
            "contiguous, striped or zigzag"
        )
    mask = find_mask(mask)
    geometry = ring.Ring(
        axis_name,
        layout,
        key_layout,
        mask,
        q.shape[-1] ** -0.5 if scale is None else float(scale),
        None if softcap is None else float(softcap),
        int(query_chunk),
        int(key_chunk),
        kernel,
    )
    # From here on all arrays vary along the ring. If a caller's did not, autodiff sums its gradient over the ranks.
    everywhere = (q, k, v, lax.axis_index(axis_name))
    rank = everywhere[-1]
    _check_split(axis_name, ranks, rank, q=q, k=k, v=v)
    q, k, v = (
        _without_padding(varying_like(x, *everywhere), split, rank)
        for x, split in ((q, layout), (k, key_layout), (v, key_layout))
    )
    out: Array = _attention(  # pyright: ignore[reportAssignmentType]
        geometry, q, k, v, None if sinks is None else varying_like(sinks, *everywhere)
    )
    # In backward this drops the gradient of padding.
    return _without_padding(out, layout, rank)


def _without_padding(x: Array, layout: Layout, rank: Array) -> Array:
    """Zero the tokens past the end: a chunk may hold some, and 0 times NaN is NaN."""
    if layout.padded_length == layout.length:
        return x
    tokens = jnp.asarray(_tokens_of_chunks(layout))[rank]
    is_token = jnp.arange(x.shape[2] // len(tokens)) < tokens[:, None]
    return jnp.where(is_token.reshape(-1, 1), x, 0)


@lru_cache(maxsize=64)
def _tokens_of_chunks(layout: Layout) -> np.ndarray:
    """Count each rank's chunks' tokens before padding: (N, 2) for zigzag, else (N, 1)."""
    chunks = 2 if layout.name == "zigzag" else 1
    positions = layout.permutation.reshape(layout.ranks, chunks, -1)
    return (positions < layout.length).sum(-1).astype(np.int32)


def _axis_size(axis_name: str) -> int:
    try:
        return lax.axis_size(axis_name)
    except (NameError, TypeError):
        raise LayoutError(
            f"there is no mesh axis {axis_name!r} here; call ring_attention inside jax.shard_map over a mesh with that "
            "axis, or sharded_ring_attention on whole arrays"
        ) from None


def _check_split(axis_name: str, ranks: int, rank: Array, **arrays: Array) -> None:
    """Refuse arrays that ``shard_map`` knows to be replicated over the ring; unknown without its checks."""
    if ranks == 1 or axis_name not in varying_axes(rank):
        return
    for name, x in arrays.items():
        if axis_name not in varying_axes(x):
            raise LayoutError(
                f"{name} is the same on all {ranks} devices of mesh axis {axis_name!r}; split its tokens over them, as "
                f"in in_specs=P(None, None, {axis_name!r})"
            )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    geometry: ring.Ring, q: Array, k: Array, v: Array, sinks: Array | None
) -> Array:
    return ring.forward(geometry, q, k, v, sinks)[0]


def _attention_forward(
    geometry: ring.Ring, q: Array, k: Array, v: Array, sinks: Array | None
):
    out, lse = ring.forward(geometry, q, k, v, sinks)
    out, lse = checkpoint_name(out, SAVED_NAME), checkpoint_name(lse, SAVED_NAME)
    return out, (q, k, v, sinks, out, lse)


_attention.defvjp(
    _attention_forward,
    lambda geometry, saved, dout: ring.backward(geometry, dout, *saved),
)


def sharded_ring_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mesh: Mesh,
    axis_name: str = "sp",
    batch_axes: tuple[str, ...] = ("dp", "fsdp"),
    head_axis: str | None = "tp",
    sinks: Array | None = None,
    **options,
) -> Array:
    """``ring_attention`` on whole arrays, split over a mesh by a ``shard_map``.

    Args:
        q, k, v: (B, H, S, D), (B, G, S, D), (B, G, S, E), tokens in the layout's order (``ringspan.jax.shard``).
        mesh: the devices; axes named here that it lacks split nothing.
        axis_name, batch_axes, head_axis: the mesh axes that split tokens, batch and heads.
        sinks: (H,), as in ``ring_attention``, and so are options.

    Returns:
        (B, H, S, E), split as q.

    Raises:
        LayoutError: a dimension that its mesh axes do not divide, or a mesh without the ring's axis.
        UnsupportedError, LayoutError: as ``ring_attention``.
    """
    check_mesh(mesh)
    if axis_name not in mesh.shape:
        raise LayoutError(
            f"the mesh has no axis {axis_name!r}; its axes are {', '.join(mesh.axis_names)}; use one"
        )
    batch = tuple(axis for axis in batch_axes if axis in mesh.shape)
    heads = head_axis if head_axis in mesh.shape else None
    split = P(batch or None, heads, axis_name)
    for name, x in (("q", q), ("k", k), ("v", v)):
        for dim, axes in enumerate((batch, (heads,) if heads else (), (axis_name,))):
            parts = prod(mesh.shape[axis] for axis in axes)
            if x.ndim > dim and x.shape[dim] % parts:
                raise LayoutError(
                    f"{name}: dimension {dim} has {x.shape[dim]} entries, which the {parts} devices of mesh axis "
                    f"{' x '.join(axes)} do not divide; pad it, or use another mesh"
                )
    # With explicit axes shardings are part of an array's type, so arrays are resharded explicitly.
    if AxisType.Explicit in mesh.axis_types:
        q, k, v = (jax.reshard(x, NamedSharding(mesh, split)) for x in (q, k, v))
        sinks = (
            None if sinks is None else jax.reshard(sinks, NamedSharding(mesh, P(heads)))
        )
    local = partial(ring_attention, axis_name=axis_name, **options)
    # Pallas's interpreter does not know along which axes arrays vary.
    is_checked = options.get("kernel") != "pallas" or not is_interpreted()
    on_mesh = partial(jax.shard_map, mesh=mesh, out_specs=split, check_vma=is_checked)
    with_sinks = on_mesh(
        lambda q, k, v, sinks: local(q, k, v, sinks=sinks),
        in_specs=(split, split, split, P(heads)),
    )
    return with_sinks(q, k, v, sinks)


def _check_arrays(q: Array, k: Array, v: Array, sinks: Array | None) -> None:
    """Raise UnsupportedError unless q, k, v and sinks are arrays of shapes and dtypes that fit each other."""
    for name, array in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
        if array is not None and not (
            hasattr(array, "shape") and hasattr(array, "dtype")
        ):
            raise UnsupportedError(f"{name} must be an array, got {described(array)}")
    check_shapes(q.shape, k.shape, v.shape)
    for name, array in (("k", k), ("v", v)):
        if array.dtype != q.dtype:
            raise UnsupportedError(
                f"{name} is {array.dtype}, q is {q.dtype}; make them equal"
            )
    if q.dtype.name not in _DTYPES:
        raise UnsupportedError(
            f"dtype {q.dtype} is not supported; use float32 or bfloat16"
        )
    if sinks is not None and (
        sinks.shape != (q.shape[1],) or not jnp.issubdtype(sinks.dtype, jnp.floating)
    ):
        raise UnsupportedError(
            f"sinks must be a floating-point score for each of the {q.shape[1]} query heads, "
            f"got {sinks.dtype} of shape {sinks.shape}"
        )


def _check_kernel(kernel: str, q: Array, v: Array) -> None:
    find_name("kernel", kernel, JAX_KERNEL_NAMES, UnsupportedError)
    if kernel == "xla":
        return
    if kernel == "triton":
        if reason := triton.why_not(q, v):
            raise UnsupportedError(f"kernel='triton': {reason}; use kernel='xla'")
        return
    if jax.default_backend() not in ("tpu", "cpu"):
        raise UnsupportedError(
            f"kernel='pallas' is for TPUs, not for {jax.default_backend()}; use kernel='xla'"
        )
    if q.dtype.name not in ("float32", "bfloat16"):
        raise UnsupportedError(
            f"kernel='pallas' computes float32 and bfloat16, not {q.dtype}; use kernel='xla'"
        )
    if is_interpreted() and varying_axes(q):
        raise UnsupportedError(
            "kernel='pallas' on CPU is interpreted, which knows nothing of axes along which arrays differ; use "
            "kernel='xla', or jax.shard_map(..., check_vma=False)"
        )


def _check_options(
    scale: float | None, softcap: float | None, query_chunk: int, key_chunk: int
) -> None:
    for name, value in (("scale", scale), ("softcap", softcap)):
        if isinstance(value, (Array, jax.core.Tracer)):
            raise UnsupportedError(
                f"{name} is an array; it must be a plain number, known when the program is traced"
            )
    check_scores(scale, softcap)
    for name, value in (("query_chunk", query_chunk), ("key_chunk", key_chunk)):
        integer(value, name, UnsupportedError, at_least=1)

"""Deferred tensors: operations on them (transformers' renames, merges, casts) run later, for this rank's part."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import (
    tree_flatten,
    tree_iter,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

Region = tuple[slice, ...]
"""Indices of a tensor's part: per dimension a slice with start, stop and step 1."""

_aten: Final = torch.ops.aten
# Tensors of another's shape, which initialisation fills and drops for weights that are there.
_OF_ONE_SHAPE: Final = frozenset(
    {
        _aten.empty_like.default,
        _aten.zeros_like.default,
        _aten.ones_like.default,
        _aten.full_like.default,
        _aten.rand_like.default,
        _aten.randn_like.default,
    }
)
_COMPARED_BYTES: Final = (
    1 << 26
)  # bytes of each of two tensors that are compared at a time


class Source(Protocol):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: tuple[int, int]  # sort key for reading from front to back

    def read(self, region: Region) -> Tensor:
        """Read a part, as a read-only tensor."""
        ...


@runtime_checkable
class KeptSource(Source, Protocol):
    """A source that keeps what it has computed, until it is released after the last tensor that needs it."""

    def release(self) -> None: ...


@dataclass(frozen=True)
class _Made:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None  # index among several results; None if there is one


class Deferred(Tensor):
    """A CPU tensor without numbers yet; operations are deferred until ``part``; in place, only zeroing."""

    origin: "Source | _Made"
    # Parts filled with zeroes: some models initialise padding rows so.
    zeroes: list[Region]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, origin: "Source | _Made"
    ) -> "Deferred":
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=torch.device("cpu")
        )
        made.origin, made.zeroes = origin, []
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Deferred({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Deferred":
        # The origin never changes, so a copy is another tensor with the same one.
        copied: Any = Deferred(self.shape, self.dtype, self.origin)
        copied.zeroes = [*self.zeroes]
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        return memo.setdefault(id(self), copied)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Record an operation as deferred results; its shapes come from meta tensors.

        ``equal`` and reading a number compute at once, and a tensor that has only the shape of a deferred one is
        there at once. In place, only zeroing a deferred tensor is allowed; an operation that changes another tensor
        gets whole inputs.
        """
        kwargs = kwargs or {}
        if func is _aten.equal.default:
            return _are_equal(*args)
        if func._schema.is_mutable:
            if func is _aten.zero_.default and isinstance(args[0], Deferred):
                owner, region = _place_in_memory(args[0])
                owner.zeroes.append(region)
                return args[0]
            if isinstance(args[0], Deferred):
                raise RuntimeError(
                    f"{func} would change a tensor that is not there yet"
                )
            return func(*tree_map(_whole_of, args), **tree_map(_whole_of, kwargs))
        if func is _aten._local_scalar_dense.default:
            return func(*tree_map(_whole_of, args))
        # Devices are dropped: everything is computed on the host, from the files.
        kwargs = {
            name: value
            for name, value in kwargs.items()
            if name not in ("device", "pin_memory", "layout")
        }
        metas: Any = tree_map_only(
            Tensor,
            lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"),
            (args, kwargs),
        )
        if func in _OF_ONE_SHAPE:
            return func(*metas[0], **metas[1] | {"device": "cpu"})
        results, shape = tree_flatten(func(*metas[0], **metas[1]))
        alone = (
            len(results) == 1 and not isinstance(shape.context, int) and shape.is_leaf()
        )
        return tree_unflatten(
            [
                Deferred(
                    result.shape,
                    result.dtype,
                    _Made(func, args, kwargs, None if alone else index),
                )
                if isinstance(result, Tensor)
                else result
                for index, result in enumerate(results)
            ],
            shape,
        )


def deferred(source: Source) -> Deferred:
    return Deferred(source.shape, source.dtype, source)


def whole(tensor: Tensor) -> Tensor:
    return part(tensor, region_of(tensor.shape))


def part(tensor: Tensor, region: Region) -> Tensor:
    """Compute a part of a tensor, and no more than its operations require."""
    if not isinstance(tensor, Deferred):
        return tensor[region]
    made = _part(tensor, region)
    for zero in tensor.zeroes:
        made = made.clone()  # memory of a file must not be written to
        starts = [each.start for each in region]
        made[
            tuple(
                slice(max(z.start - s, 0), max(z.stop - s, 0))
                for z, s in zip(zero, starts, strict=True)
            )
        ] = 0
    return made


def _part(tensor: Deferred, region: Region) -> Tensor:
    origin = tensor.origin
    if not isinstance(origin, _Made):
        return origin.read(region)
    rule = _RULES.get(origin.function)
    if rule is not None:
        return rule(
            region,
            *origin.args,
            **origin.kwargs,
            **({} if origin.index is None else {"index": origin.index}),
        )
    result = origin.function(
        *tree_map(_whole_of, origin.args), **tree_map(_whole_of, origin.kwargs)
    )
    return (result if origin.index is None else tree_flatten(result)[0][origin.index])[
        region
    ]


def pieces(tensor: Tensor, most_bytes: int) -> Iterator[Region]:
    """Yield a tensor's parts by rows, of limited bytes; the whole if a part costs as much."""
    row_bytes = max(1, math.prod(tensor.shape[1:])) * tensor.dtype.itemsize
    rows = max(1, most_bytes // row_bytes)
    if tensor.ndim == 0 or rows >= tensor.shape[0] or not _is_made_in_parts(tensor):
        yield region_of(tensor.shape)
        return
    for start in range(0, tensor.shape[0], rows):
        yield (
            slice(start, min(start + rows, tensor.shape[0])),
            *region_of(tensor.shape[1:]),
        )


def _is_made_in_parts(tensor: Tensor) -> bool:
    origin = tensor.origin if isinstance(tensor, Deferred) else None
    if not isinstance(origin, _Made):
        return True
    inputs = [
        leaf
        for leaf in tree_iter((origin.args, origin.kwargs))
        if isinstance(leaf, Tensor)
    ]
    return origin.function in _RULES and all(map(_is_made_in_parts, inputs))


def sources_of(tensor: Tensor) -> list[Source]:
    found: dict[int, Source] = {}
    todo = [tensor]
    while todo:
        each = todo.pop()
        if not isinstance(each, Deferred):
            continue
        if isinstance(each.origin, _Made):
            todo += [
                leaf
                for leaf in tree_iter((each.origin.args, each.origin.kwargs))
                if isinstance(leaf, Deferred)
            ]
        else:
            found.setdefault(id(each.origin), each.origin)
    return list(found.values())


def release_after(tensors: Mapping[str, Tensor]) -> dict[str, list[KeptSource]]:
    """Return, by the name of a tensor, the kept sources that no later tensor of this order reads."""
    last: dict[int, tuple[str, KeptSource]] = {}
    for name, tensor in tensors.items():
        for source in sources_of(tensor):
            if isinstance(source, KeptSource):
                last[id(source)] = (name, source)
    found: dict[str, list[KeptSource]] = {}
    for name, source in last.values():
        found.setdefault(name, []).append(source)
    return found


def release(tensor: Tensor) -> None:
    """Release the sources of a tensor that keep what they have computed."""
    for source in sources_of(tensor):
        if isinstance(source, KeptSource):
            source.release()


def region_of(shape: Sequence[int]) -> Region:
    return tuple(slice(0, size) for size in shape)


def held_regions(parameter: DTensor) -> list[Region]:
    """Return the parts of the whole tensor that this rank's shard holds, in its order."""
    if not parameter.to_local().numel():
        return []
    # The places that torch.distributed.checkpoint plans with, for every kind of sharding.
    places = parameter.__create_chunk_list__()
    return [region_at(place.offsets, place.sizes) for place in places]


def is_first_copy(parameter: DTensor) -> bool:
    """Return True on the rank whose shard represents all equal ones."""
    mesh = parameter.device_mesh
    return not any(
        p.is_replicate() and mesh.get_local_rank(axis)
        for axis, p in enumerate(parameter.placements)
    )


def region_at(offsets: Sequence[int], sizes: Sequence[int]) -> Region:
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


def overlap(one: Region, other: Region) -> tuple[Region, Region] | None:
    """Return the overlap of two parts of a tensor, in the indices of each; None without one."""
    both = [
        (max(a.start, b.start), min(a.stop, b.stop))
        for a, b in zip(one, other, strict=True)
    ]
    if any(low >= high for low, high in both):
        return None
    firsts = ([each.start for each in part] for part in (one, other))
    here, there = (
        tuple(slice(a - f, b - f) for (a, b), f in zip(both, first, strict=True))
        for first in firsts
    )
    return here, there


def shape_of(region: Region) -> tuple[int, ...]:
    return tuple(each.stop - each.start for each in region)


def _place_in_memory(view: Deferred) -> tuple[Deferred, Region]:
    region = region_of(view.shape)
    while isinstance(view.origin, _Made) and (
        outer := _VIEWS.get(view.origin.function)
    ):
        inner, *details = view.origin.args
        view, region = inner, outer(region, inner, *details)
    return view, region


def _selected(region: Region, x: Tensor, dim: int, number: int) -> Region:
    dim, number = dim % x.ndim, number % x.shape[dim]
    return (*region[:dim], slice(number, number + 1), *region[dim:])


def _unchanged(region: Region, x: Tensor) -> Region:
    return region


_VIEWS: Final[dict[Any, Callable[..., Region]]] = {
    _aten.alias.default: _unchanged,
    _aten.detach.default: _unchanged,
    _aten.select.int: _selected,
}


def _whole_of(x: object) -> object:
    # Deferred tensors claim to be contiguous, and PyTorch chose the operations by that.
    return whole(x).contiguous() if isinstance(x, Deferred) else x


def _are_equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return all(
        torch.equal(part(a, region), part(b, region))
        for region in pieces(a, _COMPARED_BYTES)
    )


def _with(region: Region, dim: int, new: slice) -> Region:
    return (*region[:dim], new, *region[dim + 1 :])


def _moved(region: Region, dim: int, offset: int) -> Region:
    return _with(
        region, dim, slice(region[dim].start + offset, region[dim].stop + offset)
    )


def _same(region: Region, x: Tensor, **_: object) -> Tensor:
    return part(x, region)


def _cast(
    region: Region, x: Tensor, *, dtype: torch.dtype | None = None, **_: object
) -> Tensor:
    made = part(x, region)
    return made if dtype is None else made.to(dtype)


def _slice(
    region: Region,
    x: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
):
    """Compute a region of ``x[start:end:step]`` along ``dim``, from the region of x that it covers."""
    dim, (first, _, step) = dim % x.ndim, slice(start, end, step).indices(x.shape[dim])
    if step == 1:
        return part(x, _moved(region, dim, first))
    low, high = region[dim].start, region[dim].stop
    if low == high:
        return part(x, region)
    strided = part(
        x, _with(region, dim, slice(first + low * step, first + (high - 1) * step + 1))
    )
    return strided[(*(slice(None),) * dim, slice(None, None, step))]


def _select(region: Region, x: Tensor, dim: int = 0, index: int = 0) -> Tensor:
    return part(x, _selected(region, x, dim, index)).squeeze(dim % x.ndim)


def _split(
    region: Region, x: Tensor, size: int | Sequence[int], dim: int = 0, *, index: int
) -> Tensor:
    offset = index * size if isinstance(size, int) else sum(size[:index])
    return part(x, _moved(region, dim % x.ndim, offset))


def _cat(region: Region, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Compute a region of a concatenation, from the inputs that overlap it."""
    dim, offset, parts = dim % tensors[0].ndim, 0, list[Tensor]()
    for each in tensors:
        low = max(region[dim].start, offset) - offset
        high = min(region[dim].stop, offset + each.shape[dim]) - offset
        if low < high:
            parts.append(part(each, _with(region, dim, slice(low, high))))
        offset += each.shape[dim]
    # The region is empty.
    if not parts:
        return part(tensors[0], _with(region, dim, slice(0, 0)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _stack(region: Region, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    dim %= tensors[0].ndim + 1
    inner = (*region[:dim], *region[dim + 1 :])
    chosen = tensors[region[dim]]
    if not chosen:
        return part(tensors[0], inner).unsqueeze(dim).narrow(dim, 0, 0)
    return torch.stack([part(each, inner) for each in chosen], dim)


def _unsqueeze(region: Region, x: Tensor, dim: int) -> Tensor:
    dim %= x.ndim + 1
    made = part(x, (*region[:dim], *region[dim + 1 :])).unsqueeze(dim)
    return made.narrow(dim, 0, region[dim].stop - region[dim].start)


def _squeeze(region: Region, x: Tensor, dim: int) -> Tensor:
    dim %= x.ndim
    if x.shape[dim] != 1:
        return part(x, region)
    return part(x, (*region[:dim], slice(0, 1), *region[dim:])).squeeze(dim)


def _transpose(region: Region, x: Tensor, first: int, second: int) -> Tensor:
    order = list(range(x.ndim))
    order[first], order[second] = order[second], order[first]
    return _permute(region, x, order)


def _permute(region: Region, x: Tensor, order: Sequence[int]) -> Tensor:
    order = [dim % x.ndim for dim in order]
    inner = tuple(region[order.index(dim)] for dim in range(x.ndim))
    return part(x, inner).permute(*order)


# Operations whose parts need only parts of their inputs; any other computes its inputs whole.
_RULES: Final[dict[Any, Callable[..., Tensor]]] = {
    _aten.alias.default: _same,
    _aten.detach.default: _same,
    _aten.clone.default: _same,
    _aten.contiguous.default: _same,
    _aten._to_copy.default: _cast,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.unbind.int: _select,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.squeeze.dim: _squeeze,
    _aten.transpose.int: _transpose,
    _aten.t.default: lambda region, x: _permute(region, x, range(x.ndim)[::-1]),
    _aten.permute.default: _permute,
}

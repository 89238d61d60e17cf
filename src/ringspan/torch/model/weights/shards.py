"""A model's weights, split over ranks, as deferred tensors that all ranks read together, one after the other.

Files and other programs take the same stream: one rank, or every one, gets the numbers, and the others send theirs.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ringspan.torch.engine.transport.collectives import gather_over
from ringspan.torch.model.weights.deferred import (
    Deferred,
    Region,
    deferred,
    held_regions,
    is_first_copy,
    overlap,
    region_of,
    shape_of,
)

SLICES: Final = "slices"
"""Name of the list of slices in a module of experts, hence in the names of their parameters."""
_SLICE: Final = re.compile(rf"\.{SLICES}\.\d+\.")


@dataclass(frozen=True)
class Readers:
    """The ranks that get the numbers: the first of the mesh, or every one; in host memory or on the weights' device.

    With a ``group`` of all ranks the first gets the present numbers at any later time, over that group: a copy waits in
    each rank's host memory.
    """

    mesh: DeviceMesh
    everywhere: bool = False
    on_host: bool = True
    group: dist.ProcessGroup | None = None

    @property
    def first(self) -> int:
        return int(self.mesh.mesh.min())

    @property
    def is_one(self) -> bool:
        return self.everywhere or dist.get_rank() == self.first

    @property
    def axes(self) -> list[str]:
        """Axes over which a tensor is gathered: a replica that reads has a copy of its own."""
        names = self.mesh.mesh_dim_names or ()
        return [name for name in names if not (self.everywhere and name == "replicate")]

    def empty(self, region: Region, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a part on a rank that reads, and a meta tensor on others."""
        place = "meta" if not self.is_one else "cpu" if self.on_host else device
        return torch.empty(shape_of(region), dtype=dtype, device=place)


class Shards:
    """A tensor split over ranks; all read together, and only readers get numbers."""

    def __init__(self, name: str, tensor: Tensor, place: int, readers: Readers) -> None:
        self.name, self.place = name, (place, 0)
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        # The parameter itself: its part on this rank may lie elsewhere after a step.
        self._tensor, self._readers = tensor, readers
        self.mine = _held_by_me(tensor, readers)
        self.everyone: list[tuple[int, Region]] = []
        self._copy: Tensor | None = None

    def copy(self) -> None:
        """Copy into host memory what this rank will send of the tensor, if anything."""
        sends = any(holder == dist.get_rank() for holder, _ in self.everyone)
        local = self._local() if sends else torch.empty(0)
        # The values of now, even where the tensor is in host memory already.
        self._copy = torch.empty_like(local, device="cpu").copy_(local)

    def _local(self) -> Tensor:
        """Return the part of the tensor on this rank."""
        if self._copy is not None:
            return self._copy
        tensor = self._tensor.detach()
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def read(self, region: Region) -> Tensor:
        """Return a part of the tensor on ranks that read, and an empty meta tensor on others; collective."""
        local = self._local()
        result = self._readers.empty(region, self.dtype, local.device)
        send = self._to_all if self._readers.everywhere else self._to_first
        for holder, held in self.everyone:
            if (meeting := overlap(region, held)) is None:
                continue
            here, there = meeting
            mine = local[there].contiguous() if holder == dist.get_rank() else None
            piece = send(mine, holder, here, local.device)
            if piece is not None:
                result[here] = piece.to(result.device)
        return result

    def _to_first(
        self, mine: Tensor | None, holder: int, here: Region, device: torch.device
    ) -> Tensor | None:
        """Send a holder's part to the rank that reads; return it there."""
        if holder == self._readers.first:
            return mine
        if mine is not None:
            dist.send(mine, self._readers.first, self._readers.group)
        elif self._readers.is_one:
            piece = torch.empty(shape_of(here), dtype=self.dtype, device=device)
            dist.recv(piece, holder, self._readers.group)
            return piece
        return None

    def _to_all(
        self, mine: Tensor | None, holder: int, here: Region, device: torch.device
    ) -> Tensor:
        """Send a holder's part to all ranks, axis by axis; return it."""
        mesh = self._readers.mesh
        piece = mine
        if piece is None:
            piece = torch.empty(shape_of(here), dtype=self.dtype, device=device)
        at = dict(zip(mesh.mesh_dim_names or (), _place(mesh, holder), strict=True))
        # The axes along which this rank differs from the holder, and has not received yet.
        apart = {axis for axis in at if mesh.get_local_rank(axis) != at[axis]}
        for axis in self._readers.axes:
            group = mesh.get_group(axis)
            if group.size() > 1 and apart <= {axis}:
                # As bytes, because gloo has no dtypes of 8 bits.
                sent = piece.view(-1).view(torch.uint8)
                dist.broadcast(sent, group_src=at[axis], group=group)
            apart -= {axis}
        return piece


def shards_of(model: PreTrainedModel, readers: Readers) -> dict[str, Deferred]:
    """Return the saved tensors, for collective reading. All ranks call it."""
    names = _saved_parts(model)
    everything = tensors_of(model)
    shards = [
        Shards(name, everything[name], place, readers)
        for place, name in enumerate(names)
    ]
    mine = [each.mine for each in shards]
    told = gather_over(readers.mesh, mine, readers.axes)
    for index, each in enumerate(shards):
        # Equal copies are read from the first rank that has one.
        first: dict[str, tuple[int, Region]] = {}
        for rank in told:
            if rank[index] is not None:
                first.setdefault(repr(rank[index][1]), rank[index])
        each.everyone = [*first.values()]
        if readers.group is not None:
            each.copy()
    return join_slices({each.name: deferred(each) for each in shards})


def join_slices(tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Join the slices of experts under the names that their tensors have in files; None if the first one is."""
    parts: dict[str, list[Any]] = {}
    for name, tensor in tensors.items():
        parts.setdefault(whole_name(name), []).append(tensor)
    return {
        name: each[0] if len(each) == 1 or each[0] is None else torch.cat(each)
        for name, each in parts.items()
    }


def whole_name(name: str) -> str:
    """Return the name that a parameter, or the tensor that it is a slice of, has in files."""
    return _SLICE.sub(".", name)


def as_stored(
    model: PreTrainedModel,
    tensors: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    *,
    original: bool = True,
) -> dict[str, Any]:
    """Return tensors under the names and in the form of a checkpoint's files, parameters in ``dtype`` if given."""
    stored = dict(tensors)
    if dtype is not None:
        parameters = model.named_parameters(remove_duplicate=False)
        for name in {whole_name(name) for name, _ in parameters}:
            if name in stored:
                stored[name] = stored[name].to(dtype)
    return revert_weight_conversion(model, stored) if original else stored


def saved_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return saved parameters and persistent buffers with all their names, tied ones under their original.

    Experts that are gathered in slices have the names of their whole tensors.
    """
    return {
        whole_name(name): [*map(whole_name, names)]
        for name, names in _saved_parts(model).items()
    }


def _saved_parts(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return ``saved_names`` with each slice of experts under its own name."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    names: dict[int, list[str]] = {}
    for name, tensor in tensors_of(model).items():
        names.setdefault(id(tensor), []).append(name)
    chosen = {
        next((name for name in each if name not in tied), each[0]): each
        for each in names.values()
    }
    return {name: each for name, each in chosen.items() if name not in ignored}


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers under all their names."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        passing = module._non_persistent_buffers_set
        own = module._parameters | {
            name: x for name, x in module._buffers.items() if name not in passing
        }
        found |= {
            f"{path}.{name}" if path else name: x
            for name, x in own.items()
            if x is not None
        }
    return found


def _place(mesh: DeviceMesh, rank: int) -> list[int]:
    return (mesh.mesh == rank).nonzero()[0].tolist()


def _held_by_me(tensor: Tensor, readers: Readers) -> tuple[int, Region] | None:
    """Return this rank and the part of a tensor that it sends, if any."""
    rank = dist.get_rank()
    if not isinstance(tensor, DTensor):
        sends = readers.is_one
        return (rank, region_of(tensor.shape)) if sends else None
    if not (readers.everywhere or is_first_copy(tensor)):
        return None
    return next(((rank, region) for region in held_regions(tensor)), None)

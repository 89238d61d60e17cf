"""Saving of a model's weights on a ring: each rank sends its part, a piece of a tensor at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ringspan.torch.transport.collectives import gather_over
from ringspan.torch.weights.deferred import (
    Deferred,
    Region,
    deferred,
    held_regions,
    is_first_copy,
    overlap,
    region_of,
    shape_of,
)
from ringspan.torch.weights.writing import WeightsPlan

Vote = Callable[[str, Exception | None], None]
"""Callback with this rank's action and error; raises on all ranks if one failed."""


class _Shards:
    """A tensor split over ranks; all read together, and only the writer gets numbers."""

    def __init__(self, name: str, tensor: Tensor, place: int, writer: int) -> None:
        self.name, self.shape, self.dtype, self.place = name, tuple(tensor.shape), tensor.dtype, (place, 0)
        self._local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        self.mine = _held_by_me(tensor, writer)
        self.everyone: list[tuple[int, Region]] = []
        self.writer = writer

    def read(self, region: Region) -> Tensor:
        rank, device = dist.get_rank(), self._local.device
        is_writer = rank == self.writer
        result = torch.empty(shape_of(region), dtype=self.dtype, device="cpu" if is_writer else "meta")
        for holder, held in self.everyone:
            if (meeting := overlap(region, held)) is None:
                continue
            here, there = meeting
            if holder == rank:
                piece = self._local[there]
                if is_writer:
                    result[here] = piece.cpu()
                else:
                    dist.send(piece.contiguous(), self.writer)
            elif is_writer:
                piece = torch.empty(shape_of(here), dtype=self.dtype, device=device)
                dist.recv(piece, holder)
                result[here] = piece.cpu()
        return result


def plan_weights(model: PreTrainedModel, mesh: DeviceMesh, **options: Any) -> WeightsPlan:
    return plan_files(model, shards_of(model, mesh), **options)


def shards_of(model: PreTrainedModel, mesh: DeviceMesh) -> dict[str, Deferred]:
    """Return the saved tensors, for collective reading. All ranks call it."""
    names = saved_names(model)
    everything = _tensors(model)
    writer = int(mesh.mesh.min())
    shards = [_Shards(name, everything[name], place, writer) for place, name in enumerate(names)]
    told = gather_over(mesh, [each.mine for each in shards])
    for index, each in enumerate(shards):
        each.everyone = [rank[index] for rank in told if rank[index] is not None]
    return {each.name: deferred(each) for each in shards}


def plan_files(
    model: PreTrainedModel,
    tensors: dict[str, Any],
    *,
    max_shard_size: int | str,
    variant: str | None = None,
    dtype: torch.dtype | None = None,
    save_original_format: bool = True,
) -> WeightsPlan:
    """Plan the files of transformers' ``save_pretrained`` for deferred tensors, cast to ``dtype`` if given."""
    if dtype is not None:
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        tensors = {name: each.to(dtype) if name in parameters else each for name, each in tensors.items()}
    made: Any = revert_weight_conversion(model, tensors) if save_original_format else tensors
    return WeightsPlan(made, max_shard_size, variant)


def write_weights(plan: WeightsPlan, folder: Path | None, vote: Vote) -> None:
    """Write all files, collectively, on writers into a ``folder``; a failure reaches all before the next."""
    for name in plan.files:
        problem: Exception | None = None
        try:
            plan.write(name, folder)
        except OSError as error:
            problem = error
        vote(f"writing {name}", problem)


def saved_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return saved parameters and persistent buffers with all their names, tied ones under their original."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    names: dict[int, list[str]] = {}
    for name, tensor in _tensors(model).items():
        names.setdefault(id(tensor), []).append(name)
    chosen = {next((name for name in each if name not in tied), each[0]): each for each in names.values()}
    return {name: each for name, each in chosen.items() if name not in ignored}


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        passing = module._non_persistent_buffers_set
        own = module._parameters | {name: x for name, x in module._buffers.items() if name not in passing}
        found |= {f"{path}.{name}" if path else name: x for name, x in own.items() if x is not None}
    return found


def _held_by_me(tensor: Tensor, writer: int) -> tuple[int, Region] | None:
    rank = dist.get_rank()
    if not isinstance(tensor, DTensor):
        return (rank, region_of(tensor.shape)) if rank == writer else None
    if not is_first_copy(tensor):
        return None
    return next(((rank, region) for region in held_regions(tensor)), None)

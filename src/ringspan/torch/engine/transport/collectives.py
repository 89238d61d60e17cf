"""Objects from all ranks, or from the first, and differentiable sums over ranks."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.errors import RingspanError

T = TypeVar("T")


def gather(thing: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather a picklable object of each rank of a group, by rank, on every rank."""
    things: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(things, thing, group=group)
    return things


def gather_over(
    mesh: DeviceMesh, thing: object, axes: Iterable[str] | None = None
) -> list[Any]:
    """Gather an object of each rank of a mesh, or along some axes, on every rank."""
    things = [thing]
    for axis in mesh.mesh_dim_names or () if axes is None else axes:
        things = [one for part in gather(things, mesh.get_group(axis)) for one in part]
    return things


def from_first_rank(function: Callable[[], T]) -> T:
    """Return a function's result on rank 0, or raise its error, on every rank."""
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = function()
        except RingspanError as error:
            found[1] = error
    dist.broadcast_object_list(found)
    value, error = found
    if error is not None:
        raise error
    return value


def take_first(message: Tensor, group: dist.ProcessGroup) -> None:
    """Overwrite a contiguous tensor of any dtype by that of a group's first rank."""
    # Sent as bytes, because gloo has no dtypes of 8 bits.
    dist.broadcast(message.flatten().view(torch.uint8), group_src=0, group=group)


class Sum(torch.autograd.Function):
    """Sum over groups' ranks; each rank uses the whole sum, and its gradient is the rank's own part."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, value: Tensor, groups: list[dist.ProcessGroup]
    ) -> Tensor:
        total = value.clone(memory_format=torch.contiguous_format)
        for group in groups:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class SumOfGradients(torch.autograd.Function):
    """A value shared by a group, used by each rank for a part of the result; its gradient parts are summed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None

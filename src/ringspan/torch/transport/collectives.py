"""Objects from all ranks, or from the first."""

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.errors import RingspanError


def gather(thing: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather a picklable object of each rank of a group (default: the default one), by rank, on every rank."""
    things: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(things, thing, group=group)
    return things


def gather_over(mesh: DeviceMesh, thing: Any, axes: Iterable[str] | None = None) -> list[Any]:
    """Gather an object of each rank of a mesh, or along some axes, on every rank."""
    things = [thing]
    for axis in mesh.mesh_dim_names or () if axes is None else axes:
        things = [one for part in gather(things, mesh[axis].get_group()) for one in part]
    return things


def from_first_rank(function: Callable[[], Any]) -> Any:
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

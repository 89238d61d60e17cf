"""Time-outs of process groups, since torch has no public names for them."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout  # pyright: ignore[reportPrivateUsage]


def timeout_seconds(group: dist.ProcessGroup, device: torch.device) -> float:
    return group._get_backend(device).options._timeout.total_seconds()  # pyright: ignore


def set_timeout(group: dist.ProcessGroup | None, seconds: float) -> None:
    _set_pg_timeout(timedelta(seconds=seconds), group)


def world_timeout_seconds(device: torch.device) -> float:
    """Return the default process group's time-out; 0 if absent or unknown."""
    world = dist.group.WORLD
    if world is None or dist.get_backend() == "fake":
        return 0
    try:
        return timeout_seconds(world, device)
    except (AttributeError, RuntimeError):  # neither gloo nor NCCL, which alone let it be set
        return 0


def take_timeout(mesh: DeviceMesh) -> None:
    """Give each axis the default process group's time-out, which torch does not pass on to a mesh."""
    device = torch.device(mesh.device_type)
    if seconds := world_timeout_seconds(device):
        for group in mesh.get_all_groups():
            if timeout_seconds(group, device) != seconds:
                set_timeout(group, seconds)

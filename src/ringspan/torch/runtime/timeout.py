"""How long the ranks of a process group wait for each other; torch has no public names for it."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout  # pyright: ignore[reportPrivateUsage]


def timeout_seconds(group: dist.ProcessGroup, device: torch.device) -> float:
    """How long the group waits for anything."""
    return group._get_backend(device).options._timeout.total_seconds()  # pyright: ignore


def set_timeout(group: dist.ProcessGroup | None, seconds: float) -> None:
    """Let the ranks of a group wait for each other so long."""
    _set_pg_timeout(timedelta(seconds=seconds), group)


def world_timeout_seconds(device: torch.device) -> float:
    """How long the ranks of the default process group wait; 0 where there is none, or it does not say."""
    world = dist.group.WORLD
    if world is None or dist.get_backend() == "fake":
        return 0
    try:
        return timeout_seconds(world, device)
    except (AttributeError, RuntimeError):  # neither gloo nor NCCL, which alone let it be set
        return 0


def take_timeout(mesh: DeviceMesh) -> None:
    """Let the ranks of each axis wait as long as those of the default process group: torch makes the groups of a mesh
    with a time-out of its own, whatever ``init_process_group`` was given.
    """
    device = torch.device(mesh.device_type)
    if seconds := world_timeout_seconds(device):
        for group in mesh.get_all_groups():
            if timeout_seconds(group, device) != seconds:
                set_timeout(group, seconds)

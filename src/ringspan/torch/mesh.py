"""The device mesh: replicas of a ring, ``world size = replicate x ring``."""

import os

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringspan.core.errors import ConfigError
from ringspan.torch.launch import join, local_device


def init_mesh(*, ring: int | None = None, replicate: int = 1) -> DeviceMesh:
    """A mesh with the axes ``replicate`` and ``ring``; neighbours of a ring are neighbouring ranks.

    Joins the process group that torchrun describes when none exists, or makes one of a single process.
    Replicas take different examples; the ranks of a ring share one. ``ring=None`` takes all ranks that ``replicate``
    leaves.

    Raises:
        ConfigError: the two numbers do not multiply to the world size.
    """
    if not dist.is_initialized():
        if "RANK" in os.environ:
            join()
        else:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    replicate, ring = split_world(dist.get_world_size(), ring, replicate)
    return init_device_mesh(local_device().type, (replicate, ring), mesh_dim_names=("replicate", "ring"))


def split_world(world_size: int, ring: int | None, replicate: int) -> tuple[int, int]:
    """(replicate, ring) with product ``world_size``.

    Raises:
        ConfigError: there is no such pair; the message names the numbers.
    """
    if replicate < 1 or world_size % replicate or (ring is not None and replicate * ring != world_size):
        shown = "?" if ring is None else ring
        raise ConfigError(
            f"replicate {replicate} x ring {shown} must equal the world size {world_size}; "
            f"rings that divide it: {', '.join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)}"
        )
    return replicate, world_size // replicate

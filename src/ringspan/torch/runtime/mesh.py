"""The device mesh, replicas x ring x tensor-parallel ranks, and the time-outs of its groups."""

import os
from datetime import timedelta
from typing import Any, Final
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringspan.core.errors import ConfigError, PeerMismatch
from ringspan.torch.runtime.environment import is_rank
from ringspan.torch.runtime.launch import join, local_device, urgent


def timeout_seconds(group: dist.ProcessGroup, device: torch.device) -> float:
    return group._get_backend(device).options._timeout.total_seconds()  # pyright: ignore


def set_timeout(group: dist.ProcessGroup | None, seconds: float) -> None:
    # Public since PyTorch 2.14.
    set_it = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_it(timedelta(seconds=seconds), group)


def world_timeout_seconds(device: torch.device) -> float:
    """Return the default process group's time-out; 0 if absent or unknown."""
    world = dist.group.WORLD
    if world is None or dist.get_backend() == "fake":
        return 0
    try:
        return timeout_seconds(world, device)
    # Only gloo and NCCL have a time-out that can be set.
    except (
        AttributeError,
        RuntimeError,
    ):
        return 0


def take_timeout(mesh: DeviceMesh) -> None:
    """Give each axis the default process group's time-out, which torch does not pass on to a mesh."""
    device = torch.device(mesh.device_type)
    if seconds := world_timeout_seconds(device):
        for group in mesh.get_all_groups():
            if timeout_seconds(group, device) != seconds:
                set_timeout(group, seconds)


AXES: Final = "replicate", "ring", "tp"


def init_mesh(
    *, ring: int | None = None, replicate: int = 1, tp: int = 1
) -> DeviceMesh:
    """Return a mesh with axes ``replicate``, ``ring`` and, above 1, ``tp``; last-axis neighbours are adjacent ranks.

    Joins the process group that torchrun describes if none exists, or makes one of a single process. Replicas take
    different examples; the ranks of a ring share one; ranks of ``tp`` share tokens and split heads, feed-forward and
    vocabulary. ``ring=None`` takes all remaining ranks. Time-outs are the process group's.

    Raises:
        ConfigError: the numbers do not multiply to the world size, or the environment describes half a rank.
        PeerMismatch: ranks ask for different meshes; on every rank, on CPUs and under torchrun.
    """
    if not dist.is_initialized():
        if is_rank():
            join()
        else:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    world_size = dist.get_world_size()
    rest = world_size // max(1, replicate * tp)
    _check_alike(
        {"ring": rest if ring is None else ring, "replicate": replicate, "tp": tp}
    )
    return make_mesh(
        local_device().type, *split_world(world_size, ring, replicate, tp), tp
    )


def _check_alike(asked: dict[str, int]) -> None:
    """Raise a PeerMismatch if ranks request different meshes, since their groups would hang."""
    device, ranks = local_device(), dist.get_world_size()
    if ranks == 1 or dist.get_backend() == "fake":
        return
    # Without torchrun's variable, ``device`` may be another rank's.
    if device.type != "cpu" and "LOCAL_RANK" not in os.environ:
        return
    mine = torch.tensor(list(asked.values()), device=device)
    everyone = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(everyone, mine)
    for name, numbers in zip(asked, torch.stack(everyone).T.tolist(), strict=True):
        odd = next(
            (rank for rank, number in enumerate(numbers) if number != numbers[0]), None
        )
        if odd is not None:
            raise PeerMismatch(
                f"the ranks ask for different meshes: {name} is {numbers[0]} on rank 0, {numbers[odd]} on rank {odd}; "
                "make the same one on every rank"
            )


def make_mesh(device_type: str, replicate: int, ring: int, tp: int) -> DeviceMesh:
    sizes = (replicate, ring) if tp == 1 else (replicate, ring, tp)
    # A ring of all ranks is the default group, which has these options; other groups would get NCCL's plain ones.
    is_part = dist.get_backend() == "nccl" and 1 < ring < dist.get_world_size()
    urgently: Any = (
        {"backend_override": {"ring": ("nccl", urgent())}} if is_part else {}
    )
    mesh = init_device_mesh(
        device_type, sizes, mesh_dim_names=AXES[: len(sizes)], **urgently
    )
    take_timeout(mesh)
    flatten_weights(mesh)
    if dist.get_backend() == "nccl" and ring > 1:
        _meet_neighbours(mesh.get_group("ring"), device_type)
    return mesh


def _meet_neighbours(group: dist.ProcessGroup, device_type: str) -> None:
    """Exchange a byte with both neighbours on a ring.

    NCCL connects a pair on the host in its first message, which would otherwise be a block of the first step.
    """
    here, ranks = group.rank(), group.size()
    peers = sorted({(here - 1) % ranks, (here + 1) % ranks})
    sent, *received = torch.zeros(
        1 + len(peers), 1, dtype=torch.uint8, device=device_type
    )
    asked = [
        (dist.irecv, each, peer) for each, peer in zip(received, peers, strict=True)
    ]
    asked += [(dist.isend, sent, peer) for peer in peers]
    messages = [
        dist.P2POp(call, x, group=group, group_peer=peer) for call, x, peer in asked
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()


def wait_for(mesh: DeviceMesh, seconds: float) -> None:
    set_timeout(dist.group.WORLD, seconds)
    take_timeout(mesh)
    flatten_weights(mesh)


# Meshes whose ranks are known to ascend: each batch asks for its mesh.
_ascending: Final[WeakSet[DeviceMesh]] = WeakSet()


def check_order(mesh: DeviceMesh) -> None:
    """Raise ConfigError for ranks that do not ascend along each axis: groups sort them."""
    # A stand-in for a mesh, or the mesh of a dry run, whose ranks are made up.
    if not isinstance(mesh, DeviceMesh) or (
        dist.is_initialized() and dist.get_backend() == "fake"
    ):
        return
    if mesh in _ascending:
        return
    ranks = mesh.mesh.numpy()
    for axis, name in enumerate(mesh.mesh_dim_names or range(mesh.ndim)):
        rows = np.moveaxis(ranks, axis, -1).reshape(-1, ranks.shape[axis])
        odd = (np.diff(rows) <= 0).any(-1)
        if odd.any():
            raise ConfigError(
                f"the mesh has ranks {rows[odd][0].tolist()} along its axis {name!r}, and process groups count theirs "
                "in ascending order; list the ranks of each axis in ascending order"
            )
    _ascending.add(mesh)


def flatten_weights(mesh: DeviceMesh) -> None:
    """Flatten ring and tp so that a norm is one sum without DTensor warnings; collective."""
    if "tp" in (mesh.mesh_dim_names or ()) and mesh.size() == dist.get_world_size():
        take_timeout(mesh[AXES[1:]]._flatten())


def tensor_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the mesh's ``tp`` axis; None if absent or of one rank."""
    tp = mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else None
    return tp if tp is not None and tp.size() > 1 else None


def loss_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the groups over which a loss is summed: replicas, and the ranks of a ring."""
    return [mesh.get_group(axis) for axis in ("replicate", "ring")]


def text_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the groups of ranks that share or generate one text."""
    groups = [
        mesh.get_group(axis) for axis in AXES[1:] if axis in (mesh.mesh_dim_names or ())
    ]
    return [group for group in groups if group.size() > 1]


def split_world(
    world_size: int, ring: int | None, replicate: int, tp: int = 1
) -> tuple[int, int]:
    """Return (replicate, ring) with product ``world_size / tp``; ConfigError, which names the numbers, if none."""
    others = replicate * tp
    if (
        min(replicate, tp) < 1
        or world_size % others
        or (ring is not None and others * ring != world_size)
    ):
        shown = f"replicate {replicate} x ring {'?' if ring is None else ring}" + (
            f" x tp {tp}" if tp != 1 else ""
        )
        raise ConfigError(
            f"{shown} must equal the world size {world_size}; "
            f"rings that divide it: {', '.join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)}"
        )
    return replicate, world_size // others

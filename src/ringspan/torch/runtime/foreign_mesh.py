"""Adapters from other libraries' meshes to our axes, over the same process groups."""

import itertools
import math
from collections.abc import Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.errors import ConfigError
from ringspan.core.mesh_axes import Names, assigned, recognised
from ringspan.torch.runtime.mesh import AXES, check_order, flatten_weights, take_timeout

# The meshes made in each default process group, since a loop maps its mesh at every step.
_mapped: Final[WeakKeyDictionary[dist.ProcessGroup, dict[Any, DeviceMesh]]] = (
    WeakKeyDictionary()
)
# Numbers for groups of one rank, higher than any job's groups.
_numbers: Final = itertools.count(1 << 30)


def ring_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh with the axes of ``init_mesh``, by known names; ConfigError for others, or descending ranks."""
    names = _names(mesh)
    check_order(mesh)
    if names in (AXES, AXES[:2]):
        return mesh
    sizes = dict(zip(names, mesh.shape, strict=True))
    roles = recognised(sizes)
    shard = roles.pop("shard")
    if any(sizes[name] > 1 for name in shard):
        raise ConfigError(
            f"the mesh has {shard[0]} = {sizes[shard[0]]}, and weights are split over the ring alone; lengthen it, "
            f'or copy them over that axis: rs.map_mesh(mesh, ring=..., replicate=("dp_replicate", "{shard[0]}"))'
        )
    return _map(mesh, roles)


def map_mesh(
    mesh: DeviceMesh, *, ring: Names, replicate: Names = None, tp: Names = None
) -> DeviceMesh:
    """Return a mesh with ``init_mesh``'s axes over the ranks of another one; call it on every rank.

    Every function recognises ``dp_replicate``, ``cp``, ``sp`` and ``tp`` (torchtitan, accelerate) without it. Process
    groups are the mesh's; one is created if two axes become one.

    Args:
        mesh: of any names and order. A part of one, as ``mesh["data", "context"]``, leaves axes out.
        ring: the axis, or axes, that split sequences and weights; None for a ring of one.
        replicate: axes whose ranks take other examples, with copies of the weights.
        tp: axes that split heads and features.

    Raises:
        ConfigError: no such axis, one given twice, one of two or more ranks without a role, or descending ranks.
    """
    sizes = dict(zip(_names(mesh), mesh.shape, strict=True))
    check_order(mesh)
    return _map(mesh, assigned(sizes, {"replicate": replicate, "ring": ring, "tp": tp}))


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    advice = "use mesh = rs.init_mesh(ring=...)"
    if not hasattr(mesh, "mesh_dim_names"):
        raise ConfigError(f"mesh={mesh!r} is no DeviceMesh; {advice}")
    if not mesh.mesh_dim_names:
        raise ConfigError(
            f"the mesh has axes without names; give it mesh_dim_names, or {advice}"
        )
    return mesh.mesh_dim_names


def _map(mesh: DeviceMesh, roles: Mapping[str, tuple[str, ...]]) -> DeviceMesh:
    """Return the mesh with our axes, made once for the same groups and roles."""
    world = dist.group.WORLD
    assert world is not None, "a mesh has process groups"
    known = _mapped.setdefault(world, {})
    # Groups are part of the key, since equal meshes made one after the other have different groups.
    groups = tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim))
    ranks = tuple(mesh.mesh.flatten().tolist())
    key = (
        mesh.device_type,
        ranks,
        mesh.mesh_dim_names,
        mesh.shape,
        groups,
        tuple(roles.items()),
    )
    if key not in known:
        known[key] = _mapped_anew(mesh, roles)
    return known[key]


def _mapped_anew(mesh: DeviceMesh, roles: Mapping[str, tuple[str, ...]]) -> DeviceMesh:
    """Return a new mesh over the same ranks and groups; an axis of several is flattened, which creates a group."""
    names = mesh.mesh_dim_names or ()
    sizes = dict(zip(names, mesh.shape, strict=True))
    ranks, axes = _arranged(mesh.mesh, names, roles), AXES
    if ranks.shape[2] == 1:
        ranks, axes = ranks.squeeze(2), AXES[:2]
    groups = []
    for axis in axes:
        split = [name for name in roles[axis] if sizes[name] > 1] or roles[axis][:1]
        if len(split) > 1:
            joined = mesh[tuple(split)]._flatten(f"ringspan_{axis}")
            take_timeout(joined)
            groups.append(joined.get_group())
        else:
            groups.append(mesh.get_group(split[0]) if split else _group_of_one())
    mapped = DeviceMesh.from_group(groups, mesh.device_type, ranks, mesh_dim_names=axes)
    flatten_weights(mapped)
    return mapped


def _arranged(
    ranks: Tensor, names: tuple[str, ...], roles: Mapping[str, tuple[str, ...]]
) -> Tensor:
    used = [names.index(name) for axis in AXES for name in roles[axis]]
    others = [dim for dim in range(len(names)) if dim not in used]
    sizes = [
        math.prod(ranks.shape[names.index(name)] for name in roles[axis])
        for axis in AXES
    ]
    return ranks.permute(*used, *others).reshape(sizes)


def _group_of_one() -> dist.ProcessGroup:
    """Make a single-rank group, uncounted: torch 2.14 names groups by their number on all ranks."""
    count = distributed_c10d._world.group_count  # pyright: ignore[reportPrivateUsage]
    distributed_c10d._world.group_count = next(_numbers)  # pyright: ignore[reportPrivateUsage]
    try:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    finally:
        distributed_c10d._world.group_count = count  # pyright: ignore[reportPrivateUsage]
    assert isinstance(group, dist.ProcessGroup), "this rank is a member"
    return group

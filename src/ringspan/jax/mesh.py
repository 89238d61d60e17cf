"""Device mesh: dp copies, fsdp splits weights and gathers them, tp splits heads and features, sp is the ring."""

from collections.abc import Mapping
from typing import Final

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from ringspan.core.errors import LayoutError
from ringspan.core.mesh_axes import Names, assigned, recognised
from ringspan.core.messages.numbers import described, integer

AXES: Final = ("dp", "fsdp", "tp", "sp")
# Axes that split the sequences of a batch, and axes that split its tokens.
BATCH_AXES: Final = ("dp", "fsdp")
TOKEN_AXES: Final = ("dp", "fsdp", "sp")


def init_mesh(*, dp: int = 1, fsdp: int = 1, tp: int = 1, sp: int = 1) -> Mesh:
    """Build a mesh of ``dp x fsdp x tp x sp`` devices, ring neighbours adjacent; LayoutError for bad sizes."""
    sizes = (dp, fsdp, tp, sp)
    for name, size in zip(AXES, sizes, strict=True):
        integer(size, name, LayoutError, at_least=1)
    sizes = tuple(map(int, sizes))
    needed, devices = int(np.prod(sizes)), jax.devices()
    if needed > len(devices):
        raise LayoutError(
            f"dp {dp} x fsdp {fsdp} x tp {tp} x sp {sp} needs {needed} devices, there are {len(devices)}; shrink the "
            'mesh, or on CPU ask for more with jax.config.update("jax_num_cpu_devices", N) before anything else'
        )
    return Mesh(
        np.array(devices[:needed]).reshape(sizes),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
    )


def map_mesh(
    mesh: Mesh,
    *,
    sp: Names = None,
    dp: Names = None,
    fsdp: Names = None,
    tp: Names = None,
) -> Mesh:
    """Return a mesh with ``init_mesh``'s axes over another's devices; an argument is an axis or several, or None.

    Every function recognises the names of torchtitan and accelerate (``dp_replicate``, ``dp_shard``, ``cp``, ``sp``,
    ``tp``) in any order without this.

    Raises:
        ConfigError: a name that is not an axis or is given twice, or an axis of two or more devices without a role.
    """
    return _map(
        mesh, assigned(dict(mesh.shape), {"dp": dp, "fsdp": fsdp, "tp": tp, "sp": sp})
    )


def own_mesh(mesh: Mesh) -> Mesh:
    """Return a mesh with ``init_mesh``'s axes over the same devices; LayoutError if no mesh, ConfigError if unknown."""
    check_mesh(mesh)
    if mesh.axis_names == AXES:
        return mesh
    roles = recognised(dict(mesh.shape))
    return _map(
        mesh,
        {
            "dp": roles["replicate"],
            "fsdp": roles["shard"],
            "tp": roles["tp"],
            "sp": roles["ring"],
        },
    )


def check_mesh(mesh: object) -> None:
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise LayoutError(
            f"mesh must be a jax.sharding.Mesh, got {described(mesh)}; make one with ringspan.jax.init_mesh"
        )


def _map(mesh: Mesh, roles: Mapping[str, tuple[str, ...]]) -> Mesh:
    """Return a mesh with our axes: each joins the given mesh's axes of its role, or has size 1 without any."""
    names = mesh.axis_names
    used = [names.index(name) for axis in AXES for name in roles[axis]]
    # Axes without a role have one device, so their place does not matter.
    others = [dim for dim in range(len(names)) if dim not in used]
    sizes = [int(np.prod([mesh.shape[name] for name in roles[axis]])) for axis in AXES]
    devices = mesh.devices.transpose(*used, *others).reshape(sizes)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))

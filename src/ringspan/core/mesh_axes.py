"""Roles of a device mesh's axes, by the names that torchtitan, accelerate and others use."""

from collections.abc import Mapping, Sequence
from typing import Final

from ringspan.core.errors import ConfigError

# The recognised names of each role. ``fsdp`` is left out: some mean ``dp_shard`` by it, others ``dp_shard`` x ``cp``.
WELL_KNOWN: Final[Mapping[str, tuple[str, ...]]] = {
    "replicate": ("replicate", "dp_replicate"),  # other examples, the same weights
    "shard": ("dp_shard",),  # other examples, other shards of the weights
    "ring": ("ring", "cp", "sp"),  # other tokens of the same examples
    "tp": ("tp",),  # other heads and features of the same tokens
}

Names = str | Sequence[str] | None


def recognised(sizes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Return the axes of each ``WELL_KNOWN`` role, in mesh order; ConfigError for other or double axes."""
    roles = {name: role for role, names in WELL_KNOWN.items() for name in names}
    if unknown := [
        f"{name} ({size})"
        for name, size in sizes.items()
        if name not in roles and size > 1
    ]:
        raise ConfigError(
            f"the mesh has the axes {', '.join(sizes)}: no role is known for {', '.join(unknown)}; say which axis is "
            "what with map_mesh, or give the part of the mesh that runs one model"
        )
    found = {
        role: tuple(name for name in sizes if roles.get(name) == role)
        for role in WELL_KNOWN
    }
    split = [name for name in found["ring"] if sizes[name] > 1]
    if len(split) > 1:
        raise ConfigError(
            f"the mesh splits sequences twice, over {' and '.join(split)}; use one of them, or "
            "make one ring of both with map_mesh"
        )
    return found | {"ring": tuple(split) or found["ring"][:1]}


def assigned(
    sizes: Mapping[str, int], given: Mapping[str, Names]
) -> dict[str, tuple[str, ...]]:
    """Return the axes that the caller gives each role; ConfigError for a wrong, double or missing name."""
    chosen = {
        role: ()
        if names is None
        else (names,)
        if isinstance(names, str)
        else tuple(names)
        for role, names in given.items()
    }
    flat = [name for names in chosen.values() for name in names]
    shown = ", ".join(sizes)
    for name in flat:
        if name not in sizes:
            raise ConfigError(
                f"the mesh has no axis {name!r}; its axes are {shown}; use one"
            )
        if flat.count(name) > 1:
            raise ConfigError(f"the axis {name!r} is given twice; give it one role")
    if left := [
        f"{name} ({size})"
        for name, size in sizes.items()
        if name not in flat and size > 1
    ]:
        raise ConfigError(
            f"the mesh has the axes {shown}: {', '.join(left)} has no role; name it as {' or '.join(chosen)}, or leave "
            "it out of the mesh"
        )
    return {
        role: tuple(name for name in sizes if name in names)
        for role, names in chosen.items()
    }

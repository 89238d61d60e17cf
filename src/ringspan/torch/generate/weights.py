"""Choice between whole weights during generation and gathering for every token."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ringspan.core.errors import ConfigError
from ringspan.core.messages.units import shown_bytes
from ringspan.core.names import WEIGHTS_NAMES
from ringspan.torch.model.layers.view import RingModel
from ringspan.torch.model.memory.sharding import kept_whole
from ringspan.torch.runtime.host import host_memory_bytes

# Share of the free memory that whole weights may take; a chunk's activations need the rest.
_SPARE: Final = 0.9

_log: Final = logging.getLogger(__name__)


def check_weights(weights: object) -> None:
    if weights not in WEIGHTS_NAMES:
        raise ConfigError(
            f"weights must be one of {', '.join(WEIGHTS_NAMES)}, got {weights!r}"
        )


@contextmanager
def weights_for_tokens(
    model: RingModel, weights: str, cache_bytes: int
) -> Iterator[None]:
    """Keep weights whole on each rank while generating, ``auto`` if they fit with ``cache_bytes``, or gather them."""
    ring = model.ring_axis
    if ring.size() == 1 or weights == "sharded" or not isinstance(model, FSDPModule):
        yield
        return
    if weights == "auto":
        more = gathered_bytes(model)
        free = _free_bytes(ring)
        fits = more + cache_bytes <= _SPARE * free
        _log.info(
            "weights stay %s while generating: %s more per rank and a cache of %s, %s free",
            "whole" if fits else "sharded, gathered for every token",
            *map(shown_bytes, (more, cache_bytes, free)),
        )
        if not fits:
            yield
            return
    with kept_whole(model):
        yield


def gathered_bytes(model: RingModel) -> int:
    """Return the bytes of a ring's gathered weights, extra to the shards; the same number on every rank."""
    precision = model._get_fsdp_state()._mp_policy.param_dtype
    return sum(
        _numbers_on_ring(parameter) * (precision or parameter.dtype).itemsize
        for parameter in model.parameters()
        if isinstance(parameter, DTensor)
    )


def _numbers_on_ring(parameter: DTensor) -> int:
    count, mesh = parameter.numel(), parameter.device_mesh
    for axis, placement in zip(
        mesh.mesh_dim_names or (), parameter.placements, strict=True
    ):
        if axis == "tp" and not placement.is_replicate():
            count = -(-count // mesh.get_group(axis).size())
    return count


def _free_bytes(ring: DeviceMesh) -> int:
    device = torch.device(ring.device_type)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        free = _free_host_bytes() // int(
            os.environ.get("LOCAL_WORLD_SIZE", ring.size())
        )
    least = torch.tensor(free, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=ring.get_group())
    return int(least)


def _free_host_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(
                int(line.split()[1]) << 10
                for line in lines
                if line.startswith("MemAvailable")
            )
    except (OSError, StopIteration):
        return host_memory_bytes()

"""Identity of a cache's model: its object and weights' state, or, in a folder, config and fingerprint."""

import hashlib
import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ringspan.torch.model.config_changes import deciding_fields
from ringspan.torch.model.consistency.fixed import known_parameters
from ringspan.torch.model.consistency.optimizers import num_steps
from ringspan.torch.model.layers.modules import local_part
from ringspan.torch.model.layers.view import RingModel, decoder_on_ring
from ringspan.torch.model.memory.sharding import settle
from ringspan.torch.model.weights.deferred import is_first_copy

# Bits kept of each sum, so that the total over any number of ranks fits in 63.
_BITS: Final = 40
# Numbers that are summed at a time.
_PART: Final = 1 << 22
# Numbers that are sampled from each tensor, at most.
_SAMPLED: Final = 16
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Reader(NamedTuple):
    """Model that read a cache's tokens, with everything else that keys depend on."""

    model: "weakref.ref[Any]"
    adapters: tuple[str, ...]
    weights: tuple[Any, ...]
    """On this rank: the changes that torch and optimizers have counted, and a sample of the numbers, since
    ``parameter.data.copy_`` and ``torch._foreach_add_`` are not counted."""


@torch.inference_mode(False)
@torch.no_grad()
def reader_of(model: RingModel) -> Reader:
    """Return the model's reader between passes; while generating, when weights may be whole, the initial one."""
    if (reader := vars(model).get("ring_reader")) is not None:
        return reader
    settle(model)
    modules = list(model.modules())
    weights = [
        x for module in modules for x in module._parameters.values() if x is not None
    ]
    tensors = [*weights, *_kept_buffers(modules), *map(local_part, weights)]
    versions = tuple(x._version for x in tensors if not x.is_inference())
    return Reader(
        weakref.ref(model),
        _adapters(modules),
        (num_steps(model), versions, _sample(tensors[len(weights) :])),
    )


def _kept_buffers(modules: Iterable[nn.Module]) -> list[Tensor]:
    with_buffers = (
        (module._buffers, module._non_persistent_buffers_set)
        for module in modules
        if module._buffers
    )
    return [
        x
        for buffers, passing in with_buffers
        for name, x in buffers.items()
        if name not in passing and x is not None
    ]


def _adapters(modules: Iterable[nn.Module]) -> tuple[str, ...]:
    return tuple(
        _adapter(values)
        for values in map(vars, modules)
        if "_disable_adapters" in values
    )


def _adapter(values: Mapping[str, Any]) -> str:
    if values["_disable_adapters"]:
        return "none"
    active, scales = values["_active_adapter"], values.get("scaling", {})
    names = [active] if isinstance(active, str) else active
    merged = [f"{name} merged" for name in values.get("merged_adapters", ())]
    return " + ".join(
        merged
        or [f"{name} x {scales[name]}" if name in scales else name for name in names]
    )


def _sample(tensors: Iterable[Tensor]) -> bytes:
    """Return the bytes of at most 16 numbers of each tensor, evenly spaced along its first dimension.

    Samples of one dtype and device are joined first: one copy to the CPU serves them all.
    """
    kinds: dict[Any, list[Tensor]] = {}
    for x in tensors:
        if x.numel():
            first = (
                x
                if x.ndim == 1
                else x.reshape(1)
                if x.ndim == 0
                else x[(slice(None), *(0,) * (x.ndim - 1))]
            )
            kinds.setdefault((x.dtype, x.device), []).append(
                first[:: -(-len(first) // _SAMPLED)]
            )
    return b"".join(
        torch.cat(each).view(torch.uint8).cpu().numpy().tobytes()
        for each in kinds.values()
    )


def config_of(model: RingModel) -> dict[str, Any]:
    values = deciding_fields(decoder_on_ring(model).config)
    if adapters := _adapters(model.modules()):
        values["adapters"] = (
            f"{', '.join(sorted(set(adapters)))} (digest {_digest(adapters)[:8]})"
        )
    return values


def weights_digest(model: RingModel) -> str:
    """Compute SHA-256 of sums over bits of weights and saved buffers, the same for every split."""
    return digest_of(
        [*known_parameters(model), *_kept_buffers(model.modules())], model.ring_mesh
    )


@torch.no_grad()
def digest_of(parameters: Sequence[Tensor], mesh: DeviceMesh) -> str:
    """Return the SHA-256 of each parameter's dtype, shape and two sums over its bits; all ranks of the mesh call it.

    Each rank sums the part that only it holds, and the sums are added over the mesh: any split of the same weights
    gives the same digest.
    """
    sums = torch.tensor(
        [_sums(parameter, mesh) for parameter in parameters],
        dtype=torch.int64,
        device=mesh.device_type,
    )
    for axis in mesh.mesh_dim_names or ():
        if mesh.get_group(axis).size() > 1:
            dist.all_reduce(sums, group=mesh.get_group(axis))
    sums &= (1 << _BITS) - 1
    facts = [
        (str(parameter.dtype), list(parameter.shape), row)
        for parameter, row in zip(parameters, sums.tolist(), strict=True)
    ]
    return _digest(facts)


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _sums(parameter: Tensor, mesh: DeviceMesh) -> tuple[int, int]:
    """Compute two sums over the bits that only this rank has of a parameter; zeros for copies."""
    is_split = isinstance(parameter, DTensor)
    # Along the mesh axes that a parameter is not split over, every rank has the same copy; the first one counts.
    names = (parameter.device_mesh.mesh_dim_names or ()) if is_split else ()
    others = (
        mesh.get_local_rank(axis)
        for axis in mesh.mesh_dim_names or ()
        if axis not in names
    )
    if any(others) or (is_split and not is_first_copy(parameter)):
        return 0, 0
    local = local_part(parameter.detach()).contiguous().flatten()
    bits = local.view(_INTEGERS[local.element_size()])
    first = second = 0
    for part in bits.split(_PART):
        numbers = part.long()
        first += int(numbers.sum())
        second += int((numbers * numbers % 1_000_003).sum())
    return first % (1 << _BITS), second % (1 << _BITS)

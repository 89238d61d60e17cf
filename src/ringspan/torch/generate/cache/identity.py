"""Which model a cache is of: what its config says, and a fingerprint of its weights that no mesh changes."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ringspan.torch.consistency.fixed import known_parameters
from ringspan.torch.layers.modules import local_part

_BITS: Final = 40  # of each sum: added up over any number of ranks, they stay within 63
_PART: Final = 1 << 22  # numbers at a time
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# What a config says that does not change what a model computes.
_APART: Final = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}


def config_of(model: Any) -> dict[str, Any]:
    """What the config of a model's decoder says, as JSON values."""
    values = model.get_submodule(model.ring_decoder).config.to_dict()
    return json.loads(json.dumps({name: values[name] for name in sorted(values) if name not in _APART}, default=str))


def weights_digest(model: Any) -> str:
    """SHA-256 of sums over the bits of each weight, the same however they are split. Call it on every rank."""
    return digest_of(known_parameters(model), model.ring_mesh)


@torch.no_grad()
def digest_of(parameters: Sequence[Tensor], mesh: Any) -> str:
    """``weights_digest`` of some weights of a model on a mesh."""
    sums = torch.tensor(
        [_sums(parameter, mesh) for parameter in parameters], dtype=torch.int64, device=mesh.device_type
    )
    for axis in mesh.mesh_dim_names:
        if mesh[axis].size() > 1:
            dist.all_reduce(sums, group=mesh[axis].get_group())
    sums &= (1 << _BITS) - 1
    facts = [
        (str(parameter.dtype), list(parameter.shape), row)
        for parameter, row in zip(parameters, sums.tolist(), strict=True)
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _sums(parameter: Tensor, mesh: Any) -> tuple[int, int]:
    """Two sums over the bits of what this rank alone has of a parameter: zeros where another rank has the same."""
    if isinstance(parameter, DTensor):
        coordinate = parameter.device_mesh.get_coordinate() or ()
        copies = [place for place, kind in zip(coordinate, parameter.placements, strict=True) if kind.is_replicate()]
        # A mesh of fewer axes than the model's: along the others, all ranks have the same.
        names = parameter.device_mesh.mesh_dim_names or ()
        copies += [mesh[axis].get_local_rank() for axis in mesh.mesh_dim_names if axis not in names]
    else:
        copies = mesh.get_coordinate()
    if any(copies):
        return 0, 0
    local = local_part(parameter.detach()).contiguous().flatten()
    bits = local.view(_INTEGERS[local.element_size()])
    first = second = 0
    for part in bits.split(_PART):
        numbers = part.long()
        first += int(numbers.sum())
        second += int((numbers * numbers % 1_000_003).sum())
    return first % (1 << _BITS), second % (1 << _BITS)

"""Equal weights on all ranks before they are split: FSDP takes each shard from its own rank's values."""

import logging
from collections.abc import Iterator
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.messages.lines import few
from ringspan.torch.engine.transport.collectives import take_first
from ringspan.torch.engine.transport.digest import digest_values
from ringspan.torch.model.consistency.calls import Call, hear_all
from ringspan.torch.model.weights.loading import refuse_not_finite
from ringspan.torch.model.weights.packed import plain_parts

_log: Final = logging.getLogger(__name__)


def describe_weights(model: nn.Module) -> dict[str, str]:
    """Return each parameter's and buffer's shape, dtype and requires_grad, to be equal on all ranks."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}, "
        + ("trained" if tensor.requires_grad else "not trained")
        for name, tensor in _tensors(model)
    }


def check_finite(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise ConfigError, on the mesh's first rank, for NaN and infinity in its weights."""
    if dist.get_backend(mesh.get_group("ring")) != "fake" and dist.get_rank() == int(
        mesh.mesh.min()
    ):
        refuse_not_finite(
            part
            for name, weight in model.named_parameters()
            for part in plain_parts(name, weight)
        )
        buffers = (
            (name, x) for name, x in model.named_buffers() if x.is_floating_point()
        )
        # A buffer may hold an infinite limit on purpose.
        refuse_not_finite((name, x.masked_fill(x.isinf(), 0)) for name, x in buffers)


@torch.no_grad()
def share_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    """Copy the first rank's values into tensors that differ between ranks, as with different seeds; collective."""
    if mesh.size() == 1 or dist.get_backend(mesh.get_group("ring")) == "fake":
        return
    digests = {
        name: digest_values(tensor)
        for name, tensor in _tensors(model)
        if not tensor.is_meta
    }
    if (
        len(everyone := hear_all(mesh, Call("comparing the weights", said=digests)))
        == 1
    ):
        return
    different = [
        name
        for name, digest in digests.items()
        if any(one[name] != digest for one in everyone)
    ]
    tensors = dict(_tensors(model))
    for name in different:
        _broadcast(tensors[name], mesh)
    first = int(mesh.mesh.min())
    if dist.get_rank() == first:
        _log.warning(
            "the ranks had different values of %s: all have those of rank %d now; call torch.manual_seed(SEED) on "
            "every rank before weights are drawn, to have them equal",
            few(different, 3),
            first,
        )


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, packed ones as plain parts that can be compared and copied into, then buffers."""
    for name, parameter in model.named_parameters():
        yield from plain_parts(name, parameter)
    yield from model.named_buffers()


def _broadcast(tensor: Tensor, mesh: DeviceMesh) -> None:
    message = tensor.to(mesh.device_type).contiguous()
    for axis in mesh.mesh_dim_names or ():
        take_first(message, mesh.get_group(axis))
    tensor.copy_(message)

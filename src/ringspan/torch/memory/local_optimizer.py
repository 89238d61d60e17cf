"""Optimizers of bitsandbytes, whose kernels take plain tensors: state in blocks of 256 numbers of each rank's shard."""

from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from ringspan.core.errors import UnsupportedError
from ringspan.torch.layers.modules import local_part

_sharded: Final[WeakKeyDictionary[Optimizer, list[list[nn.Parameter]]]] = WeakKeyDictionary()


def is_local(optimizer: Optimizer) -> bool:
    return any(kind.__module__.startswith("bitsandbytes.optim") for kind in type(optimizer).__mro__)


def give_shards(optimizer: Any) -> None:
    """Put this rank's shards in an optimizer; UnsupportedError if it takes norms of whole weights."""
    take_back(optimizer)  # a step that has raised
    if not any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        return
    arguments = getattr(optimizer, "args", None)
    if getattr(arguments, "max_unorm", 0.0) > 0:
        raise UnsupportedError(
            f"{type(optimizer).__name__} limits updates by the norm of a whole weight (max_unorm), of which a rank has "
            "a part; use AdamW8bit, PagedAdamW8bit or Lion8bit"
        )
    if not optimizer.initialized:
        optimizer.check_overrides()  # which compares parameters
    _sharded[optimizer] = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [_shard_of(optimizer, p) for p in group["params"]]


def take_back(optimizer: Any) -> None:
    for group, params in zip(optimizer.param_groups, _sharded.pop(optimizer, []), strict=False):
        for p, shard in zip(params, group["params"], strict=True):
            if shard is p:
                continue
            optimizer.mng.pid2config.pop(id(shard), None)
            if shard in optimizer.state:
                optimizer.state[p] = optimizer.state.pop(shard)
        group["params"] = params


def own_state(optimizer: Any) -> dict[str, Tensor]:
    """Return a rank's own state to save, by place of the parameter: packed by blocks of its shard."""
    if not is_local(optimizer):
        return {}
    states = [optimizer.state.get(p) or {} for group in optimizer.param_groups for p in group["params"]]
    return {
        f"optimizer/{place}/{key}": torch.as_tensor(value)
        for place, state in enumerate(states)
        for key, value in state.items()
        if not key.startswith("qmap")
    }


def take_counts(optimizer: Any, loaded: dict[str, Tensor]) -> None:
    """Put counts of steps back, which are plain numbers; tensors were loaded in place."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, value in loaded.items():
        _, place, key = name.split("/")
        if key == "step":
            optimizer.state[parameters[int(place)]]["step"] = int(value)


def _shard_of(optimizer: Any, p: nn.Parameter) -> nn.Parameter:
    if not isinstance(p, DTensor):
        return p
    shard = nn.Parameter(local_part(p.detach()), requires_grad=p.requires_grad)
    if p.grad is not None and shard.numel():  # its kernels take no tensor without numbers
        shard.grad = local_part(p.grad).contiguous()
    if p in optimizer.state:
        optimizer.state[shard] = optimizer.state.pop(p)
    if (settings := optimizer.mng.pid2config.get(id(p))) is not None:
        optimizer.mng.pid2config[id(shard)] = settings
    return shard

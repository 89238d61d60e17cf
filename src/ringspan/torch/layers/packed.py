"""Frozen weights packed by torchao (int8, int4), made shardable by FSDP2 through their plain tensors.

FSDP2 cannot shard packed tensor subclasses. So each is replaced by its parts (integers, scales, zero points) as
parameters, sharded and gathered layer by layer at their packed size; its module rebuilds the packed tensor on access.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize


def is_packed(tensor: Tensor) -> bool:
    """Return True if a weight is a torchao tensor."""
    return type(tensor).__module__.startswith("torchao.")


def plain_parts(name: str, tensor: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and plain tensors of a weight, itself unless packed. They share its memory."""
    if is_packed(tensor):
        for part in tensor.__tensor_flatten__()[0]:
            yield f"{name}.{part}", getattr(tensor, part)
    else:
        yield name, tensor


def packed_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield path, module, name and tensor of each packed weight; a shared one repeatedly."""
    for path, module in model.named_modules():
        for name, weight in module._parameters.items():
            if weight is not None and is_packed(weight):
                yield path, module, name, weight


def split_into_parts(model: nn.Module) -> None:
    """Replace each packed weight by its parts as parameters; ``module.weight`` rebuilds the packed tensor on access."""
    for _, module, name, weight in [*packed_weights(model)]:
        # unsafe: not compared with what it was, since packed tensors do not compare.
        parametrize.register_parametrization(module, name, _Packed(weight), unsafe=True)


def has_packed(model: nn.Module) -> bool:
    """Return True if a model has packed weights or their parts."""
    is_split = any(isinstance(module, _Packed) for module in model.modules())
    return is_split or next(packed_weights(model), None) is not None


class _Packed(nn.Module):
    def __init__(self, tensor: Any) -> None:
        super().__init__()
        self._kind = type(tensor)
        self._names, self._facts = tensor.__tensor_flatten__()

    def right_inverse(self, tensor: object) -> list[Tensor]:
        return [getattr(tensor, name) for name in self._names]

    def forward(self, *parts: Tensor) -> Any:
        return self._kind.__tensor_unflatten__(dict(zip(self._names, parts, strict=True)), self._facts, None, None)

"""Frozen weights that torchao has packed (int8, int4), as FSDP2 can shard them: by the plain tensors they are made of.

FSDP2 cuts, pads and gathers plain tensors; packed ones are subclasses that do not know how. So each becomes its parts
(whole numbers, scales, zero points), which are parameters, split over ranks and gathered layer by layer as all others
are, in as many bytes as they have; and while a layer computes, its module finds the packed tensor made of them again.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize


def is_packed(tensor: Tensor) -> bool:
    """Whether a weight is one of torchao's tensors."""
    return type(tensor).__module__.startswith("torchao.")


def plain_parts(name: str, tensor: Any) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors that a weight is made of, by name: itself, unless it is packed. They share its memory."""
    if is_packed(tensor):
        for part in tensor.__tensor_flatten__()[0]:
            yield f"{name}.{part}", getattr(tensor, part)
    else:
        yield name, tensor


def packed_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Path, module and name of each packed weight, and itself; one in two modules twice."""
    for path, module in model.named_modules():
        for name, weight in module._parameters.items():
            if weight is not None and is_packed(weight):
                yield path, module, name, weight


def split_into_parts(model: nn.Module) -> None:
    """Put the parts of each packed weight in its place, as parameters.

    ``module.weight`` is the packed tensor still, made anew whenever it is asked for.
    """
    for _, module, name, weight in [*packed_weights(model)]:
        # unsafe: not compared with what it was, since packed tensors do not compare.
        parametrize.register_parametrization(module, name, _Packed(weight), unsafe=True)


def has_packed(model: nn.Module) -> bool:
    """Whether a model has packed weights, or their parts."""
    is_split = any(isinstance(module, _Packed) for module in model.modules())
    return is_split or next(packed_weights(model), None) is not None


class _Packed(nn.Module):
    """The parts of a packed tensor, and a packed tensor of such parts."""

    def __init__(self, tensor: Any) -> None:
        super().__init__()
        self._kind = type(tensor)
        self._names, self._facts = tensor.__tensor_flatten__()

    def right_inverse(self, tensor: Any) -> list[Tensor]:
        """The parts, in order."""
        return [getattr(tensor, name) for name in self._names]

    def forward(self, *parts: Tensor) -> Any:
        """The tensor of them."""
        return self._kind.__tensor_unflatten__(dict(zip(self._names, parts, strict=True)), self._facts, None, None)

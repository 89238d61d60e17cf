"""What is done to a module of somebody else's model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def hidden_of(result: Any) -> Any:
    """The hidden states that a module returned: by themselves, or first of several."""
    return result[0] if isinstance(result, tuple) else result


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in whose place a gradient goes back to all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def autocast_now(kind: str) -> Callable[[], torch.autocast]:
    """What makes contexts with the autocast that is on now for a kind of device, for what is computed again later."""
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    caches = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(kind, dtype, enabled, caches)


def mix_in(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Give a module a subclass of its own class, with a mixin before it and attributes of the class, in place.

    As FSDP2 does; the class keeps its name, which saved configs contain.
    """
    plain = type(module)
    module.__class__ = type(plain.__name__, (mixin, plain), {"__module__": plain.__module__, **attributes})

"""What is done to a module of somebody else's model."""

from typing import Any

from torch import nn


def mix_in(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Give a module a subclass of its own class, with a mixin before it and attributes of the class, in place.

    As FSDP2 does; the class keeps its name, which saved configs contain.
    """
    plain = type(module)
    module.__class__ = type(plain.__name__, (mixin, plain), {"__module__": plain.__module__, **attributes})

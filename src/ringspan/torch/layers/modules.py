"""What is done to a module of somebody else's model."""

import copy
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

_HOOKS: Final = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def hidden_of(result: Any) -> Any:
    """The hidden states that a module returned: by themselves, or first of several."""
    return result[0] if isinstance(result, tuple) else result


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in whose place a gradient goes back to all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def example_of(module: nn.Module) -> nn.Parameter:
    """The first of a module's parameters that is of real numbers, as what it computes with is: parts of packed weights
    are not.
    """
    return next(parameter for parameter in module.parameters() if parameter.is_floating_point())


def autocast_now(kind: str) -> Callable[[], torch.autocast]:
    """What makes contexts with the autocast that is on now for a kind of device, for what is computed again later."""
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    caches = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(kind, dtype, enabled, caches)


def class_name(model: nn.Module) -> str:
    """The class of somebody's model as they know it: FSDP2 puts its name before."""
    return type(model).__name__.removeprefix("FSDP")


class Mixin:
    """What is put before a module's class, and computes what that class does."""


def own_config(model: PreTrainedModel) -> None:
    """Give a model and its modules a copy of its config, in place: what is set in it then is not set for other models
    that are made from the one that the user has.
    """
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                vars(module)[name] = copies[id(value)]


def mix_in(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Give a module a subclass of its own class, with a mixin before it, and attributes, in place.

    As FSDP2 does; the class keeps its name, which saved configs contain. A forward that was set on the module itself
    would hide the mixin's, so it moves to the class behind it. Functions become methods; other values are the module's
    own: FSDP remembers every class that it was given, and what that holds would stay when the module is gone.
    """
    plain = type(module)
    behind: tuple[type, ...] = (mixin, plain)
    if "forward" in vars(module):
        own = vars(module).pop("forward")
        behind = mixin, type(plain.__name__, (plain,), {"__module__": plain.__module__, "forward": _as_method(own)})
    methods = {name: value for name, value in attributes.items() if inspect.isfunction(value)}
    module.__class__ = type(plain.__name__, behind, {"__module__": plain.__module__, **methods})
    vars(module).update({name: value for name, value in attributes.items() if name not in methods})


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes no module, as a method."""
    return lambda _, *args, **kwargs: function(*args, **kwargs)


def seen_as(plain: Callable[..., Any], forward: Callable[..., Any], without: str = "") -> Callable[..., Any]:
    """A forward in whose signature those who look (Trainer for columns, ``generate`` for images) find that of another
    one, without one of its parameters.
    """

    @wraps(plain)
    def seen(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    signature = inspect.signature(plain)
    shown: Any = seen
    shown.__signature__ = signature.replace(
        parameters=[each for name, each in signature.parameters.items() if name != without]
    )
    return seen


def hooks_of(module: nn.Module) -> tuple[int, ...]:
    """The hooks on a module itself: empty for none, and different after one came or went."""
    return tuple(id(hook) for name in _HOOKS for hook in getattr(module, name).values())


def forward_of(module: nn.Module) -> Any:
    """The forward that a module has behind our mixins: one of a class, or of its own."""
    if "forward" in vars(module):
        return vars(module)["forward"]
    kinds = (kind for kind in type(module).__mro__ if "forward" in vars(kind) and not issubclass(kind, Mixin))
    return vars(next(kinds))["forward"]


def computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether what a module of some kind computes is that kind's own forward, with parameters that are its own: no
    hooks, no other forward and no parametrization.
    """
    return (
        isinstance(module, kind)
        and forward_of(module) is kind.forward
        and not hooks_of(module)
        and "weight" in module._parameters
        and ("bias" in module._parameters or not hasattr(module, "bias"))
    )

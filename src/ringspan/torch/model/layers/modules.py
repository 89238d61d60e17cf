"""Operations on the modules of a user's model."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, Never

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from ringspan.core.errors import UnsupportedError

_HOOKS: Final = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def hidden_of(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; its gradient flows back to the whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_part(local: Tensor, of: DTensor) -> DTensor:
    """Return this rank's part of a tensor that is split like another."""
    return DTensor.from_local(
        local,
        of.device_mesh,
        of.placements,
        run_check=False,
        shape=of.shape,
        stride=of.stride(),
    )


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor gathered from all ranks if it is split over them, otherwise the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def example_of(module: nn.Module) -> Tensor:
    """Return a tensor of a module's device and compute dtype: its first unpacked parameter, if any."""
    parameters = [*module.parameters()]
    types = (getattr(part, "compute_dtype", None) for part in module.modules())
    dtype = next(
        (each for each in types if isinstance(each, torch.dtype)), torch.float32
    )
    plain = (parameter for parameter in parameters if parameter.is_floating_point())
    return next(plain, torch.empty(0, dtype=dtype, device=parameters[0].device))


def modules_in(module: nn.Module) -> list[nn.Module]:
    """Return ``[*module.modules()]`` in a tenth of the time; a module with several parents comes several times."""
    found: list[nn.Module] = []
    coming = [module]
    while coming:
        part = coming.pop()
        found.append(part)
        coming += [
            child for child in reversed(part._modules.values()) if child is not None
        ]
    return found


def trained_in(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module that need a gradient, each once."""
    found = [
        parameter
        for part in modules_in(module)
        for parameter in part._parameters.values()
        if parameter is not None and parameter.requires_grad
    ]
    return [*dict.fromkeys(found)]


def class_name(model: nn.Module) -> str:
    """Return the user's name of a model's class, without FSDP2's prefix."""
    return type(model).__name__.removeprefix("FSDP")


class Mixin:
    """Base of classes put before a module's class."""


def own_config(model: PreTrainedModel) -> None:
    """Give a model and its modules a copy of its config, so that other models' do not change."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                vars(module)[name] = copies[id(value)]


def mix_in(module: nn.Module, mixin: type, **attributes: object) -> None:
    """Put a mixin before a module's class, which keeps its name for saved configs, and set attributes, in place.

    A forward set on the module itself moves after the mixin. Functions become methods; other values belong to the
    module, since FSDP keeps every class alive.
    """
    plain = type(module)
    behind: tuple[type, ...] = (mixin, plain)
    if "forward" in vars(module):
        own = vars(module).pop("forward")
        behind = (
            mixin,
            type(
                plain.__name__,
                (plain,),
                {
                    "__module__": plain.__module__,
                    "forward": lambda _, *a, **k: own(*a, **k),
                },
            ),
        )
    methods = {
        name: value for name, value in attributes.items() if inspect.isfunction(value)
    }
    module.__class__ = type(
        plain.__name__, behind, {"__module__": plain.__module__, **methods}
    )
    vars(module).update(
        {name: value for name, value in attributes.items() if name not in methods}
    )


def refusing(why: str) -> Callable[..., Never]:
    """Return a method that raises UnsupportedError; ``{model}`` in the message is the model's class."""

    def refuse(self: nn.Module, *args: object, **kwargs: object) -> Never:
        raise UnsupportedError(why.replace("{model}", class_name(self)))

    return refuse


@contextmanager
def instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    # A hook (accelerate's, for example) may have set a forward on the module itself.
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def seen_as(
    plain: Callable[..., Any], forward: Callable[..., Any], without: str = ""
) -> Callable[..., Any]:
    """Give a forward the signature of another, less one parameter: Trainer and ``generate`` inspect it."""

    @wraps(plain)
    def seen(*args: object, **kwargs: object) -> object:
        return forward(*args, **kwargs)

    signature = inspect.signature(plain)
    shown: Any = seen
    shown.__signature__ = signature.replace(
        parameters=[
            each for name, each in signature.parameters.items() if name != without
        ]
    )
    return seen


def hooks_of(module: nn.Module) -> tuple[int, ...]:
    """Return a key of a module's own hooks, empty without hooks; adding or removing one changes it."""
    return tuple(id(hook) for name in _HOOKS for hook in getattr(module, name).values())


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return the forward below our mixins: the class's, or the module's own."""
    if "forward" in vars(module):
        return vars(module)["forward"]
    kinds = (
        kind
        for kind in type(module).__mro__
        if "forward" in vars(kind) and not issubclass(kind, Mixin)
    )
    return vars(next(kinds))["forward"]


def computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return True if a module computes its kind's own forward: no hooks, other forward or parametrization."""
    return (
        isinstance(module, kind)
        and forward_of(module) is kind.forward
        and not hooks_of(module)
        and "weight" in module._parameters
        and ("bias" in module._parameters or not hasattr(module, "bias"))
    )

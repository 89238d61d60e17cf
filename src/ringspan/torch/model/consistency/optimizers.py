"""Tracking of optimizers in a user's own loop; the next forward pass checks that ranks agree."""

import hashlib
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ringspan.core.errors import UnsupportedError
from ringspan.torch.model.memory.adamw import give_shards, is_local, take_back
from ringspan.torch.model.memory.sharding import gathered_parameters

_STEPS: Final = "steps of the optimizer "
_hooks: Final[list[Any]] = []  # one in a process
_models: Final[WeakSet[nn.Module]] = WeakSet()
_owners: Final[WeakKeyDictionary[Optimizer, WeakSet[nn.Module]]] = WeakKeyDictionary()
_members: Final[WeakKeyDictionary[Optimizer, str]] = WeakKeyDictionary()
_steps: Final[WeakKeyDictionary[nn.Module, dict[str, Any]]] = WeakKeyDictionary()


def watch_optimizers(model: nn.Module) -> None:
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_note))
        _hooks.append(register_optimizer_step_post_hook(_end))
    _models.add(model)


def optimizer_facts(model: nn.Module) -> dict[str, Any]:
    return _steps.get(model, {})


def num_steps(model: nn.Module) -> int:
    return sum(
        count
        for name, count in optimizer_facts(model).items()
        if name.startswith(_STEPS)
    )


def _note(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Count a step of an optimizer for each model that it updates, with its settings, for the next pass to compare.

    An optimizer that works on local shards gets them for this step.
    """
    # Searched once per optimizer, because it goes through all parameters of all models.
    if optimizer not in _owners:
        _owners[optimizer] = _find_owners(optimizer)
    for model in _owners[optimizer]:
        facts = _steps.setdefault(model, {})
        kind = type(optimizer).__name__
        name = f"{_STEPS}{kind}"
        facts[name] = facts.get(name, 0) + 1
        facts[f"parameters of the optimizer {kind}"] = _members[optimizer]
        for key in optimizer.param_groups[0]:
            if key != "params":
                settings = tuple(
                    _plain(group.get(key)) for group in optimizer.param_groups
                )
                facts[f"optimizer setting {key} of {kind}"] = (
                    settings[0] if len(settings) == 1 else settings
                )

    if _owners[optimizer] and is_local(optimizer):
        give_shards(optimizer)


def _end(optimizer: Optimizer, args: tuple[Any, ...], kwargs: object) -> None:
    if is_local(optimizer):
        take_back(optimizer)


def _describe(optimizer: Optimizer) -> str:
    # Parameters are named by their place in the model, since addresses differ between processes.
    places = {
        id(parameter): place
        for model in _models
        for place, parameter in enumerate(model.parameters())
    }
    groups = [
        [places.get(id(parameter), -1) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]
    digest = hashlib.blake2b(repr(groups).encode(), digest_size=4).hexdigest()
    return f"{', '.join(str(len(group)) for group in groups)} (digest {digest})"


def _plain(value: object) -> object:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


@torch.no_grad()
def _find_owners(optimizer: Optimizer) -> WeakSet[nn.Module]:
    """Return the models that an optimizer updates; refuse gathered copies of shards, which it would lose."""
    theirs = {
        id(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    owners: WeakSet[nn.Module] = WeakSet()
    _members[optimizer] = _describe(optimizer)
    for model in _models:
        if any(id(parameter) in theirs for parameter in gathered_parameters(model)):
            raise UnsupportedError(
                f"{type(optimizer).__name__} was given weights of {type(model).__name__} between a forward pass and "
                "its backward pass, when they were copies; make the optimizer before the forward pass, or from "
                "model.parameters()"
            )
        if any(id(parameter) in theirs for parameter in model.parameters()):
            owners.add(model)
    return owners

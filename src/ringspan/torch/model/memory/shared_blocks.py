"""Blocks that several layers have over the same parameters, joined so that each weight belongs to one module.

FSDP gathers a layer's weights together: no weight may be in two. transformers ties blocks of several layers (Zamba)
weight by weight; here they become one module in all of them, with its own group.
"""

from itertools import accumulate
from typing import Any, NamedTuple

from torch import nn

from ringspan.core.errors import UnsupportedError
from ringspan.torch.model.layers.decoder import layers_of
from ringspan.torch.model.layers.modules import hooks_of


class SharedBlock(NamedTuple):
    layer: str
    place: str
    first: nn.Module


def find_shared_blocks(model: nn.Module) -> list[SharedBlock]:
    """Return blocks that layers share with earlier ones.

    UnsupportedError for a shared weight without a shared block.
    """
    owners: dict[int, str] = {}
    found: list[SharedBlock] = []
    layers = layers_of(model)
    for path, layer in layers.items():
        places: dict[str, nn.Module] = {}
        for name, parameter in layer.named_parameters():
            other = owners.setdefault(id(parameter), path)
            if other == path or any(name.startswith(f"{place}.") for place in places):
                continue
            place = _block_around(name, layer, layers[other])
            if place is None:
                raise UnsupportedError(
                    f"{type(model).__name__}: {path}.{name} is a weight of {other} too, and what is around it is not "
                    "the same in both, which is not supported yet; give each layer its own"
                )
            places[place] = layers[other].get_submodule(place)
        found += [SharedBlock(path, place, first) for place, first in places.items()]
    return found


def join_shared_blocks(model: nn.Module) -> list[nn.Module]:
    """Put the first of equal blocks into all their layers, in place; return each once."""
    blocks = find_shared_blocks(model)
    for block in blocks:
        model.get_submodule(block.layer).set_submodule(block.place, block.first)
    return list(dict.fromkeys(block.first for block in blocks))


def _block_around(name: str, layer: nn.Module, other: nn.Module) -> str | None:
    places = accumulate(name.split(".")[:-1], "{}.{}".format)
    theirs = dict(other.named_modules(remove_duplicate=False))
    alike = (
        each
        for each in places
        if each in theirs and _are_alike(layer.get_submodule(each), theirs[each])
    )
    return next(alike, None)


def _are_alike(mine: nn.Module, theirs: nn.Module) -> bool:
    weights = [
        {name: id(p) for name, p in block.named_parameters()}
        for block in (mine, theirs)
    ]
    kinds = [
        [_kind_of(path, module) for path, module in block.named_modules()]
        for block in (mine, theirs)
    ]
    return (
        weights[0] == weights[1]
        and kinds[0] == kinds[1]
        and not any(True for _ in mine.buffers())
    )


def _kind_of(path: str, module: nn.Module) -> tuple[Any, ...]:
    """Return everything except weights that determines a module's computation; modules with own hooks differ."""
    values = {
        name: x
        for name, x in vars(module).items()
        if isinstance(x, (bool, int, float, str))
    }
    return path, type(module), hooks_of(module), vars(module).get("forward"), values

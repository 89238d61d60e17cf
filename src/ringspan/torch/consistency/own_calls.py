"""Refusal of direct calls of modules whose weights are shards between passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Final

import torch
from torch import nn

from ringspan.core.errors import UnsupportedError
from ringspan.torch.layers.modules import Mixin, class_name

_passes: Final[list[str]] = []  # the calls of models that this process is in


@contextmanager
def calling_parts(name: str) -> Iterator[None]:
    _passes.append(name)
    try:
        yield
    finally:
        _passes.pop()


def refuse_own_calls(model: nn.Module, decoder: str) -> None:
    """Make the decoder, embeddings, layers, norm and head raise outside of a pass."""
    path = accumulate(decoder.split("."), "{}.{}".format)
    children = [child for module in (model, *map(model.get_submodule, path)) for child in module.children()]
    children += [layer for child in children if isinstance(child, nn.ModuleList) for layer in child]
    # One for each class: layers of one class share compiled programs.
    kinds: dict[type, type] = {}
    for part in dict.fromkeys(children):
        if not isinstance(part, nn.ModuleList) and next(part.parameters(), None) is not None:
            plain = type(part)
            if plain not in kinds:
                kinds[plain] = type(plain.__name__, (_Part, plain), {"__module__": plain.__module__})
            part.__class__ = kinds[plain]


class _Part(Mixin):
    def __call__(self: Any, *args: object, **kwargs: object) -> Any:
        if not _passes and torch._C._current_graph_task_id() == -1:  # nor is it computed again in backward
            raise UnsupportedError(
                f"{class_name(self)} was called by itself: only a pass of the whole model on a ring gathers its "
                "weights and splits its tokens. Compute from the logits of model(**batch) without labels, or from "
                "weights made whole, weight.full_tensor() (docs/loop.md)"
            )
        return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

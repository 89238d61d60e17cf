"""The index that chooses a layer's keys, from the choice that a module hands to attention, or from the module."""

from typing import Any

from ringspan.core.selection import Index
from ringspan.torch.mechanisms.chosen_keys.choice import Choice
from ringspan.torch.model.layers.family import ChosenKeys


def index_of(module: Any, family: ChosenKeys, choice: Choice, token: int) -> Index:
    """Return the index of an attention module, which fetches ``token`` numbers of each token."""
    if choice.index is not None:
        topk, (heads, size) = choice.index.topk, choice.index.q.shape[-2:]
        return Index(
            topk=topk,
            token=token,
            scored=heads * size,
            key=choice.index.k.shape[-1],
            kept=topk,
        )
    counted = family.cost(module, token)
    if counted is not None:
        return counted
    # A layer that takes the choice of an earlier one.
    chosen = choice.chosen[0]
    return Index(topk=chosen.shape[2 if chosen.ndim < 5 else 3], token=token)

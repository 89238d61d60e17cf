"""Layouts that balance a mask: equal tokens and work per rank, and little to send."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from ringspan.core.errors import LayoutError
from ringspan.core.geometry.folds import folded_layout
from ringspan.core.geometry.layout import CustomLayout, Layout
from ringspan.core.geometry.mask import FORMS, Mask, documents
from ringspan.core.geometry.pairs import stretches
from ringspan.core.geometry.placing import Placing
from ringspan.core.geometry.tree import Tree
from ringspan.core.messages.numbers import described, integer, is_a
from ringspan.core.names import BATCH_LAYOUT_NAMES, BatchLayoutName, find_name

CHUNK_TOKENS: Final = 128  # below, kernels lose more than balance gains
_EVEN: Final = 0.03  # of a rank's mean work: what the busiest may have more
_LEAST_LEEWAY: Final = 0.25  # of the tolerances: with less, far more is sent for hardly better balance


def balanced(mask: Mask, *, length: int, ranks: int, chunk_tokens: int = CHUNK_TOKENS) -> CustomLayout:
    """Return a layout with equal tokens, and equal work under the mask, for every rank; deterministic.

    Chunks have ``chunk_tokens`` or more on average, fewer if cut for lack of room.

    Raises:
        LayoutError: a length, a number of ranks or a size of chunks below one.
    """
    if not is_a(mask, Mask):
        raise LayoutError(f"a balanced layout needs a mask, got {described(mask)}; {FORMS}")
    numbers = {"length": length, "ranks": ranks, "chunk_tokens": chunk_tokens}
    for name, value in numbers.items():
        numbers[name] = integer(value, name, LayoutError, at_least=1)
    return _balanced(mask, *numbers.values())


def batch_layout(
    name: BatchLayoutName, length: int, ranks: int, documents_of: Sequence[int] | Tree | None = None, folds: int = 1
) -> Layout:
    """Return the named layout, or the ``balanced`` one for these documents (default: one) or this tree."""
    if not is_a(name, str):
        raise LayoutError(f"a layout's name must be one of {', '.join(BATCH_LAYOUT_NAMES)}, got {described(name)}")
    known = find_name("layout", name, BATCH_LAYOUT_NAMES, LayoutError)
    if folds != 1:
        return folded_layout(name, length, ranks, folds)
    if known != "balanced":
        return Layout(name, length, ranks)  # pyright: ignore[reportArgumentType]
    if isinstance(documents_of, Tree):
        return balanced(documents_of.mask(), length=sum(documents_of.lengths), ranks=ranks)
    return balanced(documents(documents_of or (length,)), length=sum(documents_of or (length,)), ranks=ranks)


@lru_cache(maxsize=256)  # of all sequences of a batch
def _balanced(mask: Mask, length: int, ranks: int, chunk_tokens: int) -> CustomLayout:
    cut, leeway = stretches(mask, length), 1.0
    found: list[Placing] = []
    while leeway >= _LEAST_LEEWAY:
        found.append(Placing(cut, length, ranks, chunk_tokens, leeway))
        found[-1].place_all()
        above = found[-1].most_above / _EVEN
        if above <= found[-1].mean:
            break
        leeway /= 2 if above <= 1.5 * found[-1].mean else 4
    return min(found, key=lambda each: each.most_above).layout()

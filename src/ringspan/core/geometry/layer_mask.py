"""Masks of a model's layers in any text: all earlier keys, a window of the last ones, or the query's own chunk."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Never

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.mask import (
    UNBOUNDED,
    Mask,
    Region,
    causal,
    documents,
    sliding_window,
)
from ringspan.core.geometry.shares import Runs
from ringspan.core.geometry.tree import Tree

Segments = tuple[int, ...] | Tree
"""A sequence's documents, by their lengths, or its tree."""

Blocks = tuple[tuple[int, int], ...]
"""Stretches [start, stop) of a sequence whose tokens see each other both ways."""


@dataclass(frozen=True)
class LayerMask:
    """The mask of a model's layer, whatever the text: of a query at position i in its document,

    - ``LayerMask()``: keys at 0 to i;
    - ``LayerMask(window=w)``: keys at i - w + 1 to i;
    - ``LayerMask(chunk=c)``: keys from ``i // c * c`` to i (Llama 4).

    A layer has a window or a chunk, not both. All that follows from them is answered here. A subclass for another
    pattern overrides ``of_document``, and what else it is asked for of ``reach``, ``of_documents``, ``of_tree``,
    ``over_cache`` and ``num_pairs``: those that it leaves out raise UnsupportedError, since a window's answer is not
    its own.
    """

    window: int | None = None
    chunk: int | None = None

    if TYPE_CHECKING:
        text: ClassVar[str]

    def __init_subclass__(cls) -> None:
        for name, use in _USES.items():
            if getattr(cls, name) is getattr(LayerMask, name):
                setattr(cls, name, _refusing(name, use))

    def __post_init__(self) -> None:
        # An operator takes plain values, and finds the mask again by this text. It is made here, since programs that
        # read it are not traced through ``repr``.
        vars(self)["text"] = repr(self)

    @property
    def reach(self) -> int | None:
        """The most positions that a query sees, its own included; None without a limit."""
        return self.window or self.chunk

    @property
    def earlier(self) -> int | None:
        """The most positions before its own that a query sees; None without a limit."""
        return None if self.reach is None else self.reach - 1

    @property
    def sees_all(self) -> bool:
        return self.reach is None

    @property
    def in_words(self) -> str:
        return (
            "all earlier tokens"
            if self.window is None
            else f"the last {self.window} tokens"
        )

    @property
    def as_window(self) -> "LayerMask":
        """The window of as many tokens: chunks are timed like it, with about half of its pairs."""
        return LayerMask(window=self.reach)

    def in_text(
        self, length: int, segments: Segments | None = None, blocks: Blocks = ()
    ) -> Mask:
        """Return the mask of ``length`` tokens: one document, several, or a tree, and blocks that see both ways."""
        return _in_text(self, length, segments, blocks)

    def of_document(self, length: int) -> Mask:
        """Return the mask of one document of ``length`` tokens."""
        if self.chunk is not None:
            return self.of_documents((length,))
        return causal() if self.window is None else sliding_window(self.window)

    def of_documents(self, lengths: Sequence[int]) -> Mask:
        """Return the mask of documents that follow each other."""
        if self.chunk is None:
            return documents(lengths, window=self.window)
        size = self.chunk
        pieces = ((*[size] * (each // size), each % size) for each in lengths)
        return documents(piece for some in pieces for piece in some if piece)

    def of_tree(self, tree: Tree) -> Mask:
        """Return the mask of a tree of segments, each of which sees its ancestors."""
        return tree.mask(self.window, self.chunk)

    def over_cache(self, start: int, length: int, real: Runs | None) -> Mask:
        """Return the mask of queries at [start, length) over keys at [0, length).

        ``real`` are the runs of real tokens, None if all are. Chunks are counted from the first token after padding on
        the left.
        """
        if real is None and self.chunk is None:
            return self.of_document(length)
        hi = UNBOUNDED if self.window is None else self.window - 1
        regions = [
            Region(q0, q1, max(k0, first), min(k1, first + count), 0, hi)
            for q0, q1, k0, k1 in self._stretches(start, length, real)
            for first, count in (((0, UNBOUNDED),) if real is None else real)
        ]
        return Mask(tuple(region for region in regions if not region.is_empty))

    def _stretches(
        self, start: int, length: int, real: Runs | None
    ) -> list[tuple[int, int, int, int]]:
        """Return the queries [q0, q1) and keys [k0, k1) of each chunk; everything if there are no chunks."""
        if self.chunk is None:
            return [(0, UNBOUNDED, 0, UNBOUNDED)]
        origin = real[0][0] if real else 0
        first = origin + (start - origin) // self.chunk * self.chunk
        edges = range(first, length + self.chunk, self.chunk)
        return [(one, other, one, other) for one, other in pairwise(edges)]

    def first_seen_after(self, length: int) -> int:
        """Return the first position that a token at ``length`` or later may see, padded on the left or not."""
        # Chunks of a padded sequence begin later, so that any of the last ``chunk`` tokens may be in the last one.
        return 0 if self.reach is None else max(0, length - self.reach + 1)

    def num_pairs(self, length: int) -> int:
        """Count the pairs of query and key in a document."""
        if self.chunk is None:
            return _window_pairs(length, self.window)
        whole, rest = divmod(length, self.chunk)
        return whole * _window_pairs(self.chunk, None) + _window_pairs(rest, None)


_USES = {
    "reach": "caches and plans",
    "of_documents": "packed documents",
    "of_tree": "trees of segments",
    "over_cache": "generation",
    "num_pairs": "plans",
}


def _refusing(name: str, use: str) -> property | Callable[..., Never]:
    """Return what stands for an answer that a subclass does not give."""

    def refuse(self: LayerMask, *_: object) -> Never:
        kind = type(self).__name__
        raise UnsupportedError(
            f"{kind} is asked for a mask of {use}; define {kind}.{name}, or leave them out"
        )

    return property(refuse) if name == "reach" else refuse


CAUSAL = LayerMask()


def _window_pairs(length: int, window: int | None) -> int:
    window = length if window is None else min(window, length)
    return window * length - window * (window - 1) // 2


@lru_cache(maxsize=64)
def _in_text(
    mask: LayerMask, length: int, segments: Segments | None, blocks: Blocks
) -> Mask:
    if blocks:
        assert mask.chunk is None, "no model has both"
        before = _in_text(mask, length, segments, ())
        later = (Region(start, stop, start, stop, hi=-1) for start, stop in blocks)
        return Mask((*before.regions, *later), f"({before} | {len(blocks)} blocks)")
    if segments is None:
        return mask.of_document(length)
    if isinstance(segments, Tree):
        return mask.of_tree(segments)
    return mask.of_documents(segments)

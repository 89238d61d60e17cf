"""What layers with a state have to know of the sequence that they work on, and what they keep of a pass.

A layer's own code hands tensors to a function of its module, and says nothing of layouts and documents. So these are
around it while it computes, and while it is computed again in backward.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ringspan.core.geometry.layout import Layout


class Record:
    """What the calls of one layer made: kept in its forward pass, and given again each time that is computed again."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, ...]] = []
        self._is_replayed = False
        self._next = 0

    def begin(self) -> None:
        """The layer's forward pass begins: the first time it is recorded."""
        self._is_replayed, self._next = self._next > 0, 0

    def made(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """``compute()``, or what it was the first time."""
        if not self._is_replayed:
            self._kept.append(tuple(x.detach() for x in compute()))
        self._next += 1
        return self._kept[self._next - 1]


@dataclass
class Before:
    """What the layer that is computed now takes from the tokens before this pass, which a cache holds; the same on
    every rank. None where no token was.
    """

    inputs: Tensor | None = None
    """Of its convolution, (B, C, K), the last ones."""
    state: Tensor | None = None


@dataclass(frozen=True)
class SequencePass:
    """The sequences that a forward pass works on: how they are split, and where their documents begin.

    ``layouts`` has one for each sequence of the batch, or one where they are split alike; ``starts`` has positions in
    increasing order, 0 the first, for each sequence, or once where they are alike. ``packed`` is what attention is told
    of the documents. ``before`` is there in a pass over a cache, whose layout counts from its first token on.
    """

    layouts: tuple[Layout, ...]
    group: dist.ProcessGroup | None
    starts: tuple[tuple[int, ...], ...] = ((0,),)
    packed: Any = None
    record: Record | None = field(default=None, compare=False)
    before: Before | None = field(default=None, compare=False)

    def of_rows(self) -> "list[tuple[slice, SequencePass]]":
        """The sequences that are split alike, each of the others by itself."""
        if len(self.layouts) == 1:
            return [(slice(None), self)]
        return [
            (slice(row, row + 1), replace(self, layouts=(layout,), starts=(starts,)))
            for row, (layout, starts) in enumerate(zip(self.layouts, self.starts, strict=True))
        ]


_current: ContextVar[SequencePass | None] = ContextVar("sequence_pass", default=None)


def current_pass() -> SequencePass | None:
    """The pass that layers compute now; None outside of a model on a ring."""
    return _current.get()


@contextmanager
def passing(sequences: SequencePass | None) -> Iterator[None]:
    """While active, layers with a state work on these sequences."""
    token = _current.set(sequences)
    try:
        yield
    finally:
        _current.reset(token)


def carried(checkpoint: Callable[..., Any], *, keeps: bool) -> Callable[..., Any]:
    """A function that checkpoints layers, such that what they compute again is of the pass that they computed first.

    With ``keeps`` a layer's states and what they contribute are kept, so that neither is computed or sent again.
    """

    def checkpoint_in_pass(function: Callable[..., Any], *args: Any) -> Any:
        now = current_pass()
        if now is None:
            return checkpoint(function, *args)
        sequences = replace(now, record=Record() if keeps else None)

        def in_pass(*args: Any) -> Any:
            if sequences.record is not None:
                sequences.record.begin()
            with passing(sequences):
                return function(*args)

        return checkpoint(in_pass, *args)

    return checkpoint_in_pass


def carry_passes(layers: Iterable[Any], *, keeps: bool) -> None:
    """Make the checkpointed ones of some layers of transformers compute again as they computed first, see
    ``carried``.
    """
    for layer in layers:
        if getattr(layer, "gradient_checkpointing", False):
            layer._gradient_checkpointing_func = carried(layer._gradient_checkpointing_func, keeps=keeps)

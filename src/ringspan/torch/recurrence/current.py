"""Current sequence and recorded results for layers with a state."""

# A layer's code passes only tensors on, so layouts and documents are context, also while backward recomputes it.

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.core.geometry.layout import Layout
from ringspan.torch.layers.switches import Switches
from ringspan.torch.recurrence.plan import Starts


class Record:
    """Results of one layer's calls, recorded in forward and replayed in recomputation."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, ...]] = []
        self._is_replayed = False
        self._next = 0

    def begin(self) -> None:
        """Begin a layer's forward pass; the first one is recorded."""
        self._is_replayed, self._next = self._next > 0, 0

    def made(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return ``compute()``, or its recorded result."""
        if not self._is_replayed:
            self._kept.append(tuple(x.detach() for x in compute()))
        self._next += 1
        return self._kept[self._next - 1]


@dataclass
class Before:
    """A layer's cached state from tokens before this pass, equal on every rank; None without any."""

    inputs: Tensor | None = None  # last inputs of its convolution, (B, C, K)
    state: Tensor | None = None


class IndexLoss:
    """Divergences of the indexes of a pass, which learn the attention of ``real`` queries (B, T), all but padding."""

    def __init__(self, real: Tensor) -> None:
        self.real = real
        self._found: list[Tensor] | None = []

    def add(self, loss: Tensor) -> None:
        if self._found is not None:
            self._found.append(loss)

    def take(self) -> list[Tensor]:
        """Return the losses added so far, once, since recomputed layers add theirs again."""
        found, self._found = self._found or [], None
        return found


@dataclass(frozen=True)
class SequencePass:
    """Sequences of a pass: ``layouts`` and ``starts`` (from 0) of each or all, and the cached state ``before``."""

    layouts: tuple[Layout, ...]
    group: dist.ProcessGroup | None
    starts: tuple[Starts, ...] = ((0,),)
    packed: Any = None
    record: Record | None = field(default=None, compare=False)
    before: Before | None = field(default=None, compare=False)
    fold: Any = field(default=None, compare=False)
    """The current fold (``ringspan.torch.memory.folds.Fold``) of a sequence in folds."""
    index_loss: IndexLoss | None = field(default=None, compare=False)
    is_part: bool = False  # part of a longer sequence: an index may not choose its keys without the rest

    def of_rows(self) -> "list[tuple[slice, SequencePass]]":
        """Yield the sequences that share a layout."""
        if len(self.layouts) == 1:
            return [(slice(None), self)]
        return [
            (slice(row, row + 1), replace(self, layouts=(layout,), starts=(starts,)))
            for row, (layout, starts) in enumerate(
                zip(self.layouts, self.starts, strict=True)
            )
        ]


_calls: ContextVar[Iterator[Hashable]] = ContextVar("calls")


def begin_calls(module: Hashable, _: object = None) -> None:
    """Name the following calls after a module and their number in its forward pass; a hook that runs before it."""
    _calls.set((module, number) for number in count())


def next_call() -> Hashable:
    return next(_calls.get())


_current: ContextVar[SequencePass | None] = ContextVar("sequence_pass", default=None)


def current_pass() -> SequencePass | None:
    return _current.get()


@contextmanager
def passing(sequences: SequencePass | None) -> Iterator[None]:
    token = _current.set(sequences)
    try:
        yield
    finally:
        _current.reset(token)


def carried(
    checkpoint: Callable[..., Any], switches: Switches, *, keeps: bool
) -> Callable[..., Any]:
    """Wrap a layer's checkpoint function so that recomputation belongs to its original pass.

    With ``keeps``, recomputation reuses recorded states. ``switches`` are the layer's.
    """

    def checkpoint_in_pass(function: Callable[..., Any], *args: object) -> object:
        if not torch.is_grad_enabled():  # nothing is computed again
            return checkpoint(function, *args)
        now, as_then = current_pass(), switches.noted()
        sequences = (
            None if now is None else replace(now, record=Record() if keeps else None)
        )

        def in_pass(*args: object) -> object:
            if sequences is not None and sequences.record is not None:
                sequences.record.begin()
            with as_then(), passing(sequences):
                return function(*args)

        return checkpoint(in_pass, *args)

    return checkpoint_in_pass


def carry_passes(layers: Iterable[Any], *, keeps: bool) -> None:
    for layer in layers:
        if getattr(layer, "gradient_checkpointing", False):
            checkpoint = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = carried(
                checkpoint, Switches(layer), keeps=keeps
            )

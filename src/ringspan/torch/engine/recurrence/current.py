"""Current sequence and recorded results for layers with a state."""

# A layer's code passes only tensors on, so layouts and documents are context, also while backward recomputes it.

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch import Tensor

from ringspan.core.geometry.layout import Layout
from ringspan.torch.engine.recurrence.plan import Starts

if TYPE_CHECKING:
    from ringspan.torch.engine.attention.request import Request


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


class SequencePart(Protocol):
    """A part of whole sequences that is computed by itself: its layers need what other parts have computed."""

    @property
    def number(self) -> int:
        """The part's place among the parts of its sequence, from 0."""
        ...

    @property
    def layout(self) -> Layout:
        """The layout of the part's tokens."""
        ...

    @property
    def length(self) -> int:
        """Tokens of the whole sequence, with padding."""
        ...

    def attend(self, call: Hashable, asked: "Request") -> Tensor:
        """Attend from the part's queries to keys of the whole sequence; ``call`` names the call within the part."""
        ...

    def read_state(self, call: Hashable) -> Tensor | None:
        """Return the state that the part begins with; None if it is the first part."""
        ...

    def keeps_state(self) -> bool:
        """Return True if a later part begins with this part's last state."""
        ...

    def write_state(self, call: Hashable, state: Tensor) -> None: ...

    def read_gradient(self, call: Hashable) -> Tensor | None:
        """Return the gradient of this part's last state; None if no later part has left one."""
        ...

    def write_gradient(self, call: Hashable, gradient: Tensor) -> None:
        """Leave the gradient of the state that this part began with to the part before."""
        ...


@dataclass(frozen=True)
class SequencePass:
    """Sequences of a pass: ``layouts`` and ``starts`` (from 0) of each or all, and the cached state ``before``."""

    layouts: tuple[Layout, ...]
    group: dist.ProcessGroup | None
    starts: tuple[Starts, ...] = ((0,),)
    packed: Any = None
    record: Record | None = field(default=None, compare=False)
    before: Before | None = field(default=None, compare=False)
    part: SequencePart | None = field(default=None, compare=False)
    """The part of the sequences that is computed now; None if they are computed whole."""
    notes: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    """Values that mechanisms keep for their layers during the pass, each under its name."""
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

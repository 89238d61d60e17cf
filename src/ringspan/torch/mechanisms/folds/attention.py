"""Attention of folds, one after the other: keys and values of all folds wait in a store, with their gradients.

B batch, H query heads, G key/value heads, T local tokens of a fold, D head size.
"""

import sys
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.folds import folds_read, last_reader
from ringspan.core.geometry.layout import CustomLayout
from ringspan.core.names import OffloadName
from ringspan.torch.engine.attention.handler import handled
from ringspan.torch.engine.attention.op import attend_backward, attend_forward
from ringspan.torch.engine.attention.part import accumulation_dtype
from ringspan.torch.engine.attention.request import Request, checked
from ringspan.torch.engine.kernels.partials.merge import merge_into
from ringspan.torch.model.memory.offload import Store


class Kept:
    """Tensors of folds by attention call: each read by later folds, in any order."""

    def __init__(self, offload: OffloadName) -> None:
        # No order, because the tensor stored before belongs to another layer and is not needed next.
        self._store = Store(
            min_bytes=None if offload == "activations" else sys.maxsize,
            is_ordered=False,
        )
        self._folds: dict[Hashable, dict[int, tuple[Any, ...]]] = defaultdict(dict)

    def put(self, call: Hashable, fold: int, *tensors: Tensor) -> None:
        self._folds[call][fold] = tuple(
            self._store.put(_alone(x.detach())) for x in tensors
        )

    def has(self, call: Hashable, fold: int) -> bool:
        return fold in self._folds[call]

    def fetch(self, call: Hashable, fold: int) -> None:
        """Start to bring back a fold's tensors."""
        for kept in self._folds[call].get(fold, ()):
            if not isinstance(kept, Tensor):
                kept.fetch()

    def get(self, call: Hashable, fold: int) -> tuple[Tensor, ...]:
        return tuple(
            self._store.get(kept, again=True) for kept in self._folds[call][fold]
        )

    def drop(self, call: Hashable, fold: int) -> None:
        self._folds[call].pop(fold, None)

    def pop(self, call: Hashable, fold: int) -> tuple[Tensor, ...]:
        """Return a fold's tensors and forget them; an empty tuple if it has none."""
        return tuple(self._store.get(kept) for kept in self._folds[call].pop(fold, ()))


def _alone(x: Tensor) -> Tensor:
    """Return a tensor with memory of its own, so that it keeps no larger one alive."""
    return (
        x
        if x.untyped_storage().nbytes() == x.nbytes
        else x.clone(memory_format=torch.contiguous_format)
    )


class Folds:
    """One pass over a sequence in folds: the tensors that its attention and states keep.

    Args:
        layouts: of the folds.
        offload: as given to ``parallelize``.
        keeps_results: True if backward finds attention's results, False if it computes them again.
    """

    def __init__(
        self,
        layouts: tuple[CustomLayout, ...],
        offload: OffloadName,
        *,
        keeps_results: bool,
        trains: bool = True,
    ) -> None:
        self.layouts, self.keeps_results, self.trains = layouts, keeps_results, trains
        self.keys = Kept(offload)  # and values
        # Gradients of these: the first as attention returns them, sums of several in float32.
        self.gradients = Kept(offload)
        self.results = Kept(offload)  # and their log-sum-exp
        # States that the next fold begins with, and inputs of its convolutions.
        self.states = Kept(offload)
        self.state_gradients = Kept(offload)


class Fold(NamedTuple):
    """The fold that is computed now, forward or again in backward."""

    folds: Folds
    number: int
    is_again: bool  # True in backward, when its forward pass runs again

    @property
    def has_next(self) -> bool:
        return self.number + 1 < len(self.folds.layouts)

    @property
    def layout(self) -> CustomLayout:
        return self.folds.layouts[self.number]

    @property
    def length(self) -> int:
        """Tokens of the whole sequence, with padding."""
        return len(self.folds.layouts) * self.layout.padded_length

    def attend(self, call: Hashable, asked: Request) -> Tensor:
        """Attend from this fold's queries to the keys of all folds (``attend_in_folds``)."""
        return attend_in_folds(self, call, asked)

    def read_state(self, call: Hashable) -> Tensor | None:
        """Return the state after the fold before; None in the first fold."""
        if not self.number:
            return None
        [state] = self.folds.states.get(call, self.number - 1)
        return state

    def keeps_state(self) -> bool:
        """Return True in a forward pass before the last fold: backward finds the state kept."""
        return self.has_next and not self.is_again

    def write_state(self, call: Hashable, state: Tensor) -> None:
        self.folds.states.put(call, self.number, state)

    def read_gradient(self, call: Hashable) -> Tensor | None:
        """Take the gradient that the next fold has left for this fold's last state."""
        found = self.folds.state_gradients.pop(call, self.number)
        return found[0] if found else None

    def write_gradient(self, call: Hashable, gradient: Tensor) -> None:
        self.folds.state_gradients.put(call, self.number - 1, gradient)


class _Call(NamedTuple):
    fold: Fold
    name: Hashable
    # The spec of attention to each fold: its own, then earlier ones, the latest first.
    specs: dict[int, str]


def attend_in_folds(fold: Fold, name: Hashable, asked: Request) -> Tensor:
    """Compute ``ring_attention`` of a fold's queries to the keys of all folds.

    Args:
        fold: whose turn it is.
        name: of this call within a fold, such as its module.
        asked: arguments of ``ring_attention``; its mask covers the whole sequence.

    Raises:
        UnsupportedError: the call is made twice in a fold; whatever ``ring_attention`` raises.
    """
    q, k, v, own = checked(asked._replace(layout=fold.layout))
    sizes = fold.length, fold.layout.padded_length
    read = folds_read(own.mask, *sizes, fold.number)
    # Folds have one size, so checks of a fold's own keys hold for other folds' keys.
    earlier = {
        each: str(replace(own, key_layout=fold.folds.layouts[each].spec))
        for each in read
    }
    specs = {fold.number: str(own)} | earlier
    if not fold.is_again:
        if fold.folds.keys.has(name, fold.number) or fold.folds.results.has(
            name, fold.number
        ):
            raise UnsupportedError(
                "an attention module that is called twice in a pass is not split into folds yet"
            )
        if last_reader(own.mask, *sizes, fold.number) > fold.number:
            fold.folds.keys.put(name, fold.number, k, v)
    else:
        # In backward later folds come first, and this fold's own keys are computed again.
        fold.folds.keys.drop(name, fold.number)
    out = _Attention.apply(q, k, v, asked.sinks, asked.slopes, _Call(fold, name, specs))
    for each in () if fold.folds.trains else read:
        if last_reader(own.mask, *sizes, each) == fold.number:
            fold.folds.keys.drop(name, each)
    return out


class _Attention(torch.autograd.Function):
    """Attention to keys of several folds; in backward, gradients of earlier folds' keys are added up for their turn."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        slopes: Tensor | None,
        call: _Call,
    ) -> Tensor:
        """Compute attention over the fold's own and earlier keys, or in backward take its kept result.

        Keep it if asked.
        """
        fold, results = call.fold, call.fold.folds.results

        def compute() -> tuple[Tensor, Tensor]:
            if fold.is_again and results.has(call.name, fold.number):
                out, lse = results.pop(call.name, fold.number)
                return out, lse
            return _attend(q, k, v, sinks, slopes, call)

        out, lse = handled(compute)
        if not fold.is_again and fold.folds.keeps_results:
            results.put(call.name, fold.number, out, lse)
        ctx.call = call
        ctx.save_for_backward(q, k, v, sinks, slopes, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return gradients of q, k, v and sinks.

        Gradients of earlier folds' keys are added to those that wait for their fold, and those that later folds have
        left for this fold's keys are added to its own.
        """
        [dout], (q, k, v, sinks, slopes, out, lse), call = (
            gradients,
            ctx.saved_tensors,
            ctx.call,
        )
        number, folds = call.fold.number, call.fold.folds
        dtype = accumulation_dtype(q.dtype)
        dq, dk, dv, dsinks = attend_backward(
            dout, q, k, v, sinks, slopes, out, lse, call.specs[number]
        )
        dq = dq.to(dtype)
        for each, spec in _earlier(call, folds.keys, folds.gradients):
            dq += _of_earlier(
                call,
                each,
                (dout, q, *folds.keys.get(call.name, each), None, slopes, out, lse),
                spec,
            )
        later = folds.gradients.pop(call.name, number)
        dk, dv = (
            x if not later else later[i].to(dtype).add_(x).to(x.dtype)
            for i, x in enumerate((dk, dv))
        )
        return dq.to(q.dtype), dk, dv, None if sinks is None else dsinks, None, None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    call: _Call,
) -> tuple[Tensor, Tensor]:
    """Merge attention to own keys, with the sinks, and to keys of earlier folds."""
    out, lse = attend_forward(q, k, v, sinks, slopes, call.specs[call.fold.number])
    total = out.to(lse.dtype)
    kept = call.fold.folds.keys
    for each, spec in _earlier(call, kept):
        keys, values = kept.get(call.name, each)
        merge_into(total, lse, *attend_forward(q, keys, values, None, slopes, spec))
        del keys, values  # before those after the next are fetched
    return total.to(out.dtype), lse


def _of_earlier(call: _Call, fold: int, given: tuple[Any, ...], spec: str) -> Tensor:
    """Return the queries' gradient from an earlier fold, and add its keys' gradients to the waiting ones."""
    waiting = call.fold.folds.gradients
    dq, dk, dv, _ = attend_backward(*given, spec)
    before, dtype = waiting.pop(call.name, fold), accumulation_dtype(dk.dtype)
    sums = [
        x if not before else before[i].to(dtype).add_(x) for i, x in enumerate((dk, dv))
    ]
    waiting.put(call.name, fold, *sums)
    return dq


def _earlier(call: _Call, *kept: Kept) -> Iterator[tuple[int, str]]:
    """Yield the earlier folds that are read, each with its spec, while ``kept`` tensors of the next are fetched."""
    _, *others = call.specs.items()
    for place, item in enumerate(others):
        for each, _ in others[place : place + 2]:
            for tensors in kept:
                tensors.fetch(call.name, each)
        yield item

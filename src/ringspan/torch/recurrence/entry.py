"""States, and inputs of convolutions, that a fold takes from the one before and hands on to the next."""

from bisect import bisect_right
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.torch.recurrence.current import SequencePass, next_call
from ringspan.torch.recurrence.plan import Plan


@dataclass(frozen=True)
class Entry:
    """One call's state after each fold, equal on all ranks, with its gradient on its way back.

    ``width``: numbers of its last dimension, one for each input of a convolution; 1 for any other state.
    """

    fold: Any
    call: Hashable
    plan: Plan
    group: dist.ProcessGroup | None
    width: int = 1

    @classmethod
    def of(cls, plan: Plan, sequences: SequencePass, width: int = 1) -> "Entry | None":
        return None if sequences.fold is None else cls(sequences.fold, next_call(), plan, sequences.group, width)

    def read(self) -> Tensor | None:
        """Return what the fold begins with, 0 for what is of another document; None in the first one."""
        if not self.fold.number:
            return None
        [state] = self.fold.folds.states.get(self.call, self.fold.number - 1)
        return self._seen(state)

    def write(self, state: Tensor) -> None:
        if self.fold.has_next and not self.fold.is_again:
            self.fold.folds.states.put(self.call, self.fold.number, self._summed(state))

    def read_gradient(self) -> Tensor | None:
        found = self.fold.folds.state_gradients.pop(self.call, self.fold.number)
        return found[0] if found else None

    def write_gradient(self, gradient: Tensor) -> None:
        if self.fold.number:
            gradient = self._seen(self._summed(gradient))
            self.fold.folds.state_gradients.put(self.call, self.fold.number - 1, gradient)

    def _summed(self, part: Tensor) -> Tensor:
        total = part.detach().clone(memory_format=torch.contiguous_format)
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(total, group=self.group)
        return total

    def _seen(self, state: Tensor) -> Tensor:
        first = self.plan.places[0].start
        before = [first - starts[bisect_right(starts, first) - 1] for starts in self.plan.starts]
        last = torch.arange(self.width, 0, -1)  # each entry's distance from the fold
        seen = torch.stack([last <= count for count in before]).view(-1, *[1] * (state.ndim - 2), self.width)
        return state * seen.to(state)

"""Entries that pool windows of cached tokens, split over a ring, and inputs of the last tokens for those to come.

Entry w is kept by rank w modulo N and made once. A window that is not full yet may lie on several ranks, so every rank
keeps the inputs of its tokens: less than a window.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ringspan.torch.engine.attention.cached import Turn
from ringspan.torch.generate.cache.rows import Rows


class Tail:
    """Inputs of a layer's last tokens, on every rank, for windows of ``reach`` tokens that end with later ones."""

    def __init__(self, reach: int) -> None:
        self.reach = reach
        self._inputs = Rows()

    @property
    def count(self) -> int:
        return self._inputs.count

    @property
    def nbytes(self) -> int:
        return self._inputs.nbytes

    def join(self, new: Tensor, turn: Turn) -> Tensor:
        """Keep the last of the new tokens' inputs; return this rank's (B, T, C), the first's after earlier ones."""
        before = self._inputs.tensor[:, 0] if self.count else new[:, :0]
        joined = (
            torch.cat((before, new), 1) if turn.rank == 0 or not turn.is_split else new
        )
        kept = None if turn.records_past else self.reach - 1
        self._inputs.append(last_inputs(new.mT, kept, turn).mT[:, None])
        if kept is not None:
            self._inputs.cut(max(0, self.count - kept), 0)
        return joined

    def reaches_back(self, count: int, length: int) -> bool:
        """Return whether the last ``count`` of more than ``length`` tokens can be taken back."""
        return self.count - count >= min(self.reach - 1, length)

    def take_back(self, count: int, length: int) -> None:
        """Forget ``count`` tokens after ``length``."""
        self._inputs.cut(0, min(count, self.count))

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        self._inputs.change(function)


class Pools(Tail):
    """Entries of windows that begin every ``size`` tokens: this rank's, r, r + N, r + 2 N and so on."""

    def __init__(self, size: int, reach: int, rank: int, ranks: int) -> None:
        super().__init__(reach)
        self.size = size
        self._rank, self._ranks = rank, ranks
        self._entries = Rows()

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._entries.nbytes

    def numbers(self, device: torch.device) -> Tensor:
        """Return the numbers of this rank's entries."""
        return (
            torch.arange(self._entries.count, device=device) * self._ranks + self._rank
        )

    def add(self, new: Tensor, is_new: Tensor, turn: Turn) -> Tensor:
        """Keep this rank's entries; return them (B, m, E), or all ranks' if queries are split.

        ``new`` (B, k, E) are those from ``turn.start // size`` on; the first is an older one in the rows (B,) that are
        not ``is_new``. If tokens are split, each rank has the entries it computed, and zeros for the others.
        """
        if turn.is_split:
            dist.all_reduce(new, group=turn.group)
        first = turn.start // self.size
        mine = new[:, (self._rank - first) % self._ranks :: self._ranks]
        if turn.start % self.size and first % self._ranks == self._rank:
            begun = torch.where(
                is_new[:, None, None], mine[:, :1], self._entries.stored[:, 0, -1:]
            )
            mine = torch.cat((begun, mine[:, 1:]), 1)
            self._entries.cut(0, 1)
        self._entries.append(mine[:, None])
        held = self._entries.stored[:, 0]
        return (
            self._gathered(held, -(-turn.new.length // self.size), turn)
            if turn.is_split
            else held
        )

    def _gathered(self, held: Tensor, count: int, turn: Turn) -> Tensor:
        mine = pad(held, (0, 0, 0, -(-count // self._ranks) - held.shape[1]))
        every = [torch.empty_like(mine) for _ in range(self._ranks)]
        dist.all_gather(every, mine, group=turn.group)
        return torch.stack(every, 2).flatten(1, 2)[:, :count]

    def take_back(self, count: int, length: int) -> None:
        super().take_back(count, length)
        left = len(range(self._rank, -(-length // self.size), self._ranks))
        self._entries.cut(0, self._entries.count - left)

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        super().change(function)
        self._entries.change(function)


def last_inputs(x: Tensor, count: int | None, turn: Turn) -> Tensor:
    """Return the last ``count`` of all new tokens' inputs, all if None, given this rank's (B, C, T)."""
    tokens = turn.new.length - turn.start
    first = 0 if count is None else max(0, tokens - count)
    if not turn.is_split:
        return x[..., first:]
    last = x.new_zeros((*x.shape[:-1], tokens - first))
    kept = turn.kept.to(x.device)
    here = kept >= first
    last[..., kept[here] - first] = x[..., here]
    # One rank has each input and the others zeros, so the sum is a gather.
    dist.all_reduce(last, group=turn.group)
    return last

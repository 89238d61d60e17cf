"""The running (out, lse) of a rank's queries."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringspan.core.geometry.ranges import Ranges
from ringspan.torch.engine.kernels.cuts import rows_of
from ringspan.torch.engine.kernels.device import runs_triton
from ringspan.torch.engine.kernels.partials.merge import merge_into, merge_many
from ringspan.torch.engine.kernels.partials.waiting import Waiting


class WrittenRows:
    """Rows of a sum that have been written, so that a first value needs no zeros to be added to."""

    def __init__(self, count: int) -> None:
        self._missing = self._count = count
        self._first = self._end = 0  # all rows between them are written, and no others
        # Made when rows come that are not next to those before.
        self._written: NDArray[np.bool_] | None = None

    def touch(self, rows: slice) -> int:
        """Return the number of unwritten rows; if not all of them, ``fill`` before adding."""
        if not self._missing:
            return 0
        count = rows.stop - rows.start
        if self._written is None:
            # Most sums get their rows all at once, or document by document.
            if rows.start == self._end or self._first == self._end:
                if self._first == self._end:
                    self._first = rows.start
                self._end = rows.stop
                self._missing -= count
                return count
            self._written = np.zeros(self._count, dtype=np.bool_)
            self._written[self._first : self._end] = True
        missing = count - int(np.count_nonzero(self._written[rows]))
        if missing == count:
            self._written[rows] = True
            self._missing -= count
        return missing

    def fill(self) -> Ranges:
        """Return all unwritten ranges, for neutral numbers, and mark them written."""
        missing, self._missing = self._missing, 0
        if not missing:
            return ()
        if self._written is None:
            ends = (0, self._first), (self._end, self._count)
            return tuple((start, stop) for start, stop in ends if start < stop)
        edges = np.flatnonzero(np.diff(np.concatenate(([True], self._written, [True]))))
        return tuple((int(first), int(last)) for first, last in edges.reshape(-1, 2))


Rows = tuple[Tensor, Tensor]
"""(out, lse) of some rows."""


class Partial:
    """(out, lse) of the local queries over the keys so far, added up in a float32 (or float64) result."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self._out, self._lse = out, lse
        self._rows = WrittenRows(out.shape[2])

    @staticmethod
    def of(out: Tensor, lse: Tensor) -> "Partial | Deferred":
        return Partial(out, lse) if out.dtype == lse.dtype else Deferred(out, lse)

    def merge(self, rows: slice, *partials: tuple[Tensor, ...]) -> None:
        """Merge partials of some rows; a row without keys has out 0 and lse -inf."""
        mine = rows_of(self._out, rows), rows_of(self._lse, rows)
        missing = self._rows.touch(rows)
        # Rows that are all unwritten take the partial as it is. If only some are, these first become the partial of no
        # keys, which merges like any other.
        if missing == rows.stop - rows.start:
            merge_many(*mine, partials)
            return
        if missing:
            self.running(rows)
        if len(partials) == 1 and not runs_triton(mine[0]):
            merge_into(*mine, *partials[0])
        else:
            merge_many(*mine, [mine, *partials])

    def running(self, rows: slice) -> Rows:
        for start, stop in self._rows.fill():
            self._out[:, :, start:stop].zero_()
            self._lse[:, :, start:stop].fill_(-torch.inf)
        return rows_of(self._out, rows), rows_of(self._lse, rows)

    def finish(self, sinks: Tensor | None = None) -> None:
        """Leave the result in ``out`` and ``lse``; a row without keys has out 0 and lse -inf.

        With ``sinks`` (H,): ``lse' = logaddexp(lse, sink)`` and ``out' = exp(lse - lse') out``.
        """
        self.running(slice(0, self._out.shape[2]))
        if sinks is not None:
            total = torch.logaddexp(self._lse, sinks.to(self._lse.dtype)[:, None])
            # Without keys and a sink, out stays 0.
            share = (self._lse - total).exp_().masked_fill_(total == -torch.inf, 1)
            self._out.mul_(share.unsqueeze(-1))
            self._lse.copy_(total)


class Deferred:
    """A 16-bit result, written once from all waiting partials; if too many wait, they are merged into float32 early."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self._result, self._lse = out, lse
        self._waiting = Waiting(out.shape[2])
        self._sums: Partial | None = None

    def merge(self, rows: slice, partial: Rows) -> None:
        if partial[0].dtype == self._lse.dtype:
            self._fold().merge(rows, partial)
        elif self._waiting.add(rows, *partial):
            self._fold()

    def running(self, rows: slice) -> Rows:
        return self._fold().running(rows)

    def finish(self, sinks: Tensor | None = None) -> None:
        sums = (
            None if self._sums is None else self._sums.running(self._waiting.everything)
        )
        for rows, partials in self._waiting.of(self._waiting.everything):
            before = (
                [] if sums is None else [(sums[0][:, :, rows], sums[1][:, :, rows])]
            )
            merge_many(
                rows_of(self._result, rows),
                rows_of(self._lse, rows),
                [*before, *partials],
                sinks,
            )
        self._waiting.clear()

    # Stored as (B, T, H, E), like the results of the flash kernels.
    def _fold(self) -> Partial:
        if self._sums is None:
            like = self._result.transpose(1, 2)
            sums = torch.empty_like(
                like, dtype=self._lse.dtype, memory_format=torch.contiguous_format
            )
            self._sums = Partial(sums.transpose(1, 2), self._lse)
        for rows, partials in self._waiting.of(self._waiting.everything):
            if partials:
                self._sums.merge(rows, *partials)
        self._waiting.clear()
        return self._sums

"""Growing keys or values (B, G, M, D) of one layer on one rank."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

# Rows kept free after a copy to larger memory, so that the next tokens do not copy everything again.
_ROOM_TOKENS: Final = 64


class Rows:
    def __init__(self, dtype: torch.dtype | None = None) -> None:
        # The dtype in memory; None keeps the dtype of what is added.
        self._held_as = dtype
        self._dtype = dtype
        self._place: Tensor | None = None
        self._first = self._end = 0
        self._reserved = 0

    def reserve(self, count: int) -> None:
        """Allocate ``count`` rows when the next ones do not fit, to avoid repeated moves."""
        self._reserved = max(self._reserved, count)

    @property
    def count(self) -> int:
        return self._end - self._first

    @property
    def tensor(self) -> Tensor:
        return self.stored.to(self._dtype)

    @property
    def stored(self) -> Tensor:
        assert self._place is not None, "nothing was added yet"
        return self._place[:, :, self._first : self._end]

    @property
    def nbytes(self) -> int:
        return 0 if self._place is None else self._place.nbytes

    def append(self, new: Tensor) -> None:
        self._dtype = new.dtype
        new = new if self._held_as is None else new.to(self._held_as)
        if self._place is None or self._end + new.shape[2] > self._place.shape[2]:
            self._move(new)
        assert self._place is not None
        self._place[:, :, self._end : self._end + new.shape[2]] = new
        self._end += new.shape[2]

    def cut(self, first: int, last: int) -> None:
        self._first += first
        self._end -= last
        # The rows are copied once the freed ones before them take up more memory.
        if self._place is not None and self._first > max(self.count, _ROOM_TOKENS):
            kept = self.stored
            self._place, self._first, self._end = (
                _with_room(kept, kept.shape[2]),
                0,
                kept.shape[2],
            )

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function that keeps dimension 2."""
        if self._place is not None:
            self._place = function(self._place)

    def _move(self, new: Tensor) -> None:
        old = new[:, :, :0] if self._place is None else self.stored
        count = max(old.shape[2] + new.shape[2], self._reserved)
        self._place, self._first, self._end = _with_room(old, count), 0, old.shape[2]


def _with_room(rows: Tensor, count: int) -> Tensor:
    tokens = -(-count // _ROOM_TOKENS) * _ROOM_TOKENS
    place = torch.empty(
        (*rows.shape[:2], tokens, rows.shape[3]), dtype=rows.dtype, device=rows.device
    )
    place[:, :, : rows.shape[2]] = rows
    return place

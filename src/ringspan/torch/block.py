"""What travels: keys and values of one owner (or their gradients), packed into one buffer, so that a hop is one
message.

B batch, G key/value heads, D head size, E value head size, n packed tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringspan.core.ranges import Ranges, offset, size
from ringspan.core.tile import Tile


@dataclass(frozen=True)
class Block:
    """Some of an owner's tokens: ``k`` (B, G, n, D) and ``v`` (B, G, n, E) hold the given ranges one behind the other.

    ``buffer`` is the flat tensor below both when the block is packed, else None (a rank's own keys and values).
    """

    ranges: Ranges
    k: Tensor
    v: Tensor
    buffer: Tensor | None = None

    @staticmethod
    def empty(ranges: Ranges, k: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> "Block":
        """An uninitialised packed block shaped for some ranges of ``k`` and ``v``."""
        batch, heads, _, k_size = k.shape
        tokens, v_size = size(ranges), v.shape[-1]
        rows = batch * heads * tokens
        buffer = torch.empty(rows * (k_size + v_size), dtype=dtype or k.dtype, device=k.device)
        packed_k, packed_v = buffer[: rows * k_size], buffer[rows * k_size :]
        return Block(
            ranges, packed_k.view(batch, heads, tokens, k_size), packed_v.view(batch, heads, tokens, v_size), buffer
        )

    def pack(self, ranges: Ranges) -> "Block":
        """The block cut down to some of its ranges, as one buffer; itself when nothing is cut."""
        if ranges == self.ranges and self.buffer is not None:
            return self
        packed = Block.empty(ranges, self.k, self.v)
        for start, stop in ranges:
            rows = packed.rows(start, stop)
            mine = self.rows(start, stop)
            packed.k[:, :, rows].copy_(self.k[:, :, mine])
            packed.v[:, :, rows].copy_(self.v[:, :, mine])
        return packed

    def rows(self, start: int, stop: int) -> slice:
        """Where the owner's tokens [start, stop) are in this block."""
        first = offset(self.ranges, start)
        return slice(first, first + stop - start)

    def tile(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """The keys and values that a tile reads."""
        rows = self.rows(tile.k0, tile.k1)
        return self.k[:, :, rows], self.v[:, :, rows]


class RunningSum:
    """A sum of row ranges of a (B, heads, n, size) tensor. The first contribution is taken, not added to zeros, when it
    can.

    Written into ``into`` when given (part of a packed block); otherwise a first contribution that covers all rows is
    adopted.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, into: Tensor | None = None
    ) -> None:
        self._shape, self._dtype, self._device = tuple(shape), dtype, device
        self._into = into
        self._sum: Tensor | None = None

    def add(self, rows: slice, value: Tensor) -> None:
        """Add ``value`` to the given rows."""
        if self._sum is not None:
            self._sum[:, :, rows].add_(value)
        elif value.shape[2] == self._shape[2]:
            self._sum = value.to(self._dtype) if self._into is None else self._into.copy_(value)
        else:
            self.finish()[:, :, rows].copy_(value)

    def finish(self) -> Tensor:
        """The sum; zeros where nothing was added."""
        if self._sum is None:
            blank = self._into
            if blank is None:
                blank = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._sum = blank.zero_()
        return self._sum


class GradientBlock:
    """The running sums of dk and dv for some ranges of an owner's tokens, in float32.

    One that travels is packed like the block it belongs to; the one at home is two tensors of its own.
    """

    def __init__(self, ranges: Ranges, k: Tensor, v: Tensor, dtype: torch.dtype, *, travels: bool) -> None:
        packed = Block.empty(ranges, k, v, dtype) if travels else None
        self._packed, self._ranges = packed, ranges
        tokens = size(ranges)
        self._dk, self._dv = (
            RunningSum((*one.shape[:2], tokens, one.shape[3]), dtype, one.device, into)
            for one, into in ((k, packed and packed.k), (v, packed and packed.v))
        )

    def add(self, start: int, stop: int, dk: Tensor, dv: Tensor) -> None:
        """Add the gradients of the owner's tokens [start, stop)."""
        first = offset(self._ranges, start)
        rows = slice(first, first + stop - start)
        self._dk.add(rows, dk)
        self._dv.add(rows, dv)

    def add_block(self, block: Block) -> None:
        """Add what another rank sent."""
        for start, stop in block.ranges:
            rows = block.rows(start, stop)
            self.add(start, stop, block.k[:, :, rows], block.v[:, :, rows])

    def finish(self) -> Block:
        """The sums as a block; zeros where nothing was added."""
        return Block(self._ranges, self._dk.finish(), self._dv.finish(), self._packed and self._packed.buffer)

"""What travels: keys and values of one owner (or their gradients), packed into one buffer, so that a hop is one
message.

B batch, G key/value heads, D head size, E value head size, n packed tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ringspan.core.ranges import Ranges, offset, size
from ringspan.torch.rows import Rows


@dataclass(frozen=True)
class Block:
    """Some of an owner's tokens: ``k`` (B, G, n, D) and ``v`` (B, G, n, E) hold the given ranges one behind the other.

    ``buffer`` is the flat tensor below all of it when the block is packed, else None (a rank's own keys and values).
    ``scales`` (2, B, G, 1, 1) float32 are the factors of a coded k and v, None when these are plain numbers.
    """

    ranges: Ranges
    k: Tensor
    v: Tensor
    buffer: Tensor | None = None
    scales: Tensor | None = None

    @staticmethod
    def empty(ranges: Ranges, k: Tensor, v: Tensor, dtype: torch.dtype | None = None, scaled: bool = False) -> "Block":
        """An uninitialised packed block shaped for some ranges of ``k`` and ``v``."""
        batch, heads, _, k_size = k.shape
        tokens, v_size = size(ranges), v.shape[-1]
        rows, dtype = batch * heads * tokens, dtype or k.dtype
        factors = 2 * batch * heads * torch.float32.itemsize if scaled else 0
        buffer = torch.empty(
            factors + rows * (k_size + v_size) * (dtype.itemsize if scaled else 1),
            dtype=torch.uint8 if scaled else dtype,
            device=k.device,
        )
        scales = buffer[:factors].view(torch.float32).view(2, batch, heads, 1, 1) if scaled else None
        numbers = buffer[factors:].view(dtype)
        packed_k, packed_v = numbers[: rows * k_size], numbers[rows * k_size :]
        shape = (batch, heads, tokens)
        return Block(ranges, packed_k.view(*shape, k_size), packed_v.view(*shape, v_size), buffer, scales)

    def pack(self, ranges: Ranges) -> "Block":
        """The block cut down to some of its ranges, as one buffer; itself when nothing is cut."""
        if ranges == self.ranges and self.buffer is not None:
            return self
        packed = Block.empty(ranges, self.k, self.v, scaled=self.scales is not None)
        if self.scales is not None and packed.scales is not None:
            packed.scales.copy_(self.scales)
        for start, stop in ranges:
            rows = packed.rows(start, stop)
            mine = self.rows(start, stop)
            packed.k[:, :, rows].copy_(self.k[:, :, mine])
            packed.v[:, :, rows].copy_(self.v[:, :, mine])
        return packed

    def to(self, dtype: torch.dtype) -> "Block":
        """The block in another dtype; itself when it has that one."""
        if self.k.dtype == dtype:
            return self
        other = Block.empty(self.ranges, self.k, self.v, dtype)
        other.k.copy_(self.k)
        other.v.copy_(self.v)
        return other

    def rows(self, start: int, stop: int) -> slice:
        """Where the owner's tokens [start, stop) are in this block."""
        first = offset(self.ranges, start)
        return slice(first, first + stop - start)

    def part(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the owner's tokens [start, stop), which lie within one range."""
        rows = self.rows(start, stop)
        return self.k[:, :, rows], self.v[:, :, rows]


class RunningSum:
    """A sum of row ranges of a (B, heads, n, size) tensor; what comes first to a row is written, not added to zeros."""

    def __init__(self, into: Tensor) -> None:
        self._into = into
        self._rows = Rows(into.shape[2])

    @staticmethod
    def to_be(result: Tensor, dtype: torch.dtype) -> "RunningSum":
        """A sum in ``dtype`` that is to end in ``result``: added up right there when it has that dtype."""
        return RunningSum(result if result.dtype == dtype else torch.empty_like(result, dtype=dtype))

    def add(self, start: int, stop: int, value: Tensor) -> None:
        """Add ``value`` to rows [start, stop)."""
        mine = self._into[:, :, start:stop]
        missing = self._rows.touch(start, stop)
        if missing == stop - start:
            mine.copy_(value)
            return
        if missing:
            self._clear()
        mine.add_(value)

    def running(self, start: int, stop: int) -> Tensor:
        """The sum of rows [start, stop) so far, for a kernel that adds to it in place."""
        for first, last in self._rows.fill(start, stop):
            self._into[:, :, first:last].zero_()
        return self._into[:, :, start:stop]

    def finish(self) -> Tensor:
        """The sum; zeros where nothing was added."""
        self._clear()
        return self._into

    def _clear(self) -> None:
        for start, stop in self._rows.fill():
            self._into[:, :, start:stop].zero_()


class GradientBlock:
    """The running sums of dk and dv for some ranges of an owner's tokens, in float32.

    One that travels is packed like the block it belongs to; the one at home adds up in the rank's own dk and dv.
    """

    def __init__(self, ranges: Ranges, dk: RunningSum, dv: RunningSum, buffer: Tensor | None = None) -> None:
        self.ranges, self._dk, self._dv, self._buffer = ranges, dk, dv, buffer

    @staticmethod
    def at_home(dk: Tensor, dv: Tensor, dtype: torch.dtype) -> "GradientBlock":
        """The sums that become a rank's own dk and dv; kept there when they have the right dtype."""
        return GradientBlock(((0, dk.shape[2]),), RunningSum.to_be(dk, dtype), RunningSum.to_be(dv, dtype))

    @staticmethod
    def travelling(ranges: Ranges, k: Tensor, v: Tensor, dtype: torch.dtype) -> "GradientBlock":
        """The sums for some ranges of another rank's block, ready to be sent."""
        packed = Block.empty(ranges, k, v, dtype)
        return GradientBlock(ranges, RunningSum(packed.k), RunningSum(packed.v), packed.buffer)

    def add(self, start: int, stop: int, dk: Tensor, dv: Tensor) -> None:
        """Add the gradients of the owner's tokens [start, stop)."""
        rows = self._rows(start, stop)
        self._dk.add(*rows, dk)
        self._dv.add(*rows, dv)

    def running(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The sums of the owner's tokens [start, stop) so far, for a kernel that adds to them in place."""
        rows = self._rows(start, stop)
        return self._dk.running(*rows), self._dv.running(*rows)

    def _rows(self, start: int, stop: int) -> tuple[int, int]:
        first = offset(self.ranges, start)
        return first, first + stop - start

    def add_block(self, block: Block) -> None:
        """Add what another rank sent."""
        for start, stop in block.ranges:
            rows = block.rows(start, stop)
            self.add(start, stop, block.k[:, :, rows], block.v[:, :, rows])

    def finish(self) -> Block:
        """The sums as a block; zeros where nothing was added."""
        return Block(self.ranges, self._dk.finish(), self._dv.finish(), self._buffer)

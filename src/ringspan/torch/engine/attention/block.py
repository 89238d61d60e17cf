"""Blocks that ranks exchange, each in one buffer: an owner's n keys and values, queries, or their results."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ringspan.core.geometry.ranges import Ranges, size, stored
from ringspan.torch.engine.kernels.cuts import rows_of
from ringspan.torch.engine.kernels.partials.merge import sum_many
from ringspan.torch.engine.kernels.partials.partial import Partial, WrittenRows
from ringspan.torch.engine.kernels.partials.waiting import Waiting
from ringspan.torch.engine.transport.exchange import TensorSpec


class PackedSpec(NamedTuple):
    """Layout of ranges of keys (B, G, n, D), then values (B, G, n, E), after coded bytes' scales, in a flat buffer."""

    ranges: Ranges
    batch: int
    heads: int
    k_size: int
    v_size: int
    dtype: torch.dtype
    device: torch.device
    scaled: bool = False

    @staticmethod
    def of(
        ranges: Ranges,
        k: Tensor,
        v: Tensor,
        dtype: torch.dtype | None = None,
        scaled: bool = False,
    ) -> "PackedSpec":
        return PackedSpec(
            ranges,
            k.shape[0],
            k.shape[1],
            k.shape[-1],
            v.shape[-1],
            dtype or k.dtype,
            k.device,
            scaled,
        )

    @property
    def buffer_spec(self) -> TensorSpec:
        numbers = (
            self.batch * self.heads * size(self.ranges) * (self.k_size + self.v_size)
        )
        if self.scaled:
            return TensorSpec(
                (self._factors + numbers * self.dtype.itemsize,),
                torch.uint8,
                self.device,
            )
        return TensorSpec((numbers,), self.dtype, self.device)

    @property
    def _factors(self) -> int:
        return (
            2 * self.batch * self.heads * torch.float32.itemsize if self.scaled else 0
        )

    def on(self, buffer: Tensor) -> "Block":
        """Return the block whose keys, values and scales are views of a flat buffer of this layout."""
        scales = None
        numbers = buffer
        if self.scaled:
            # Factors come first: after numbers of one byte they would not be aligned.
            scales = (
                buffer[: self._factors]
                .view(torch.float32)
                .view(2, self.batch, self.heads, 1, 1)
            )
            numbers = buffer[self._factors :].view(self.dtype)
        shape = (self.batch, self.heads, size(self.ranges))
        keys = math.prod(shape) * self.k_size
        k, v = (
            numbers[:keys].view(*shape, self.k_size),
            numbers[keys:].view(*shape, self.v_size),
        )
        return Block(self.ranges, k, v, buffer, scales)

    def empty(self) -> "Block":
        return self.on(self.buffer_spec.empty())


class Block(NamedTuple):
    """Ranges of an owner's tokens: k (B, G, n, D) and v (B, G, n, E); or queries and (B, H, n, 0); or out and lse.

    ``buffer`` is a packed block's flat tensor. ``scales`` (2, B, G, 1, 1) float32 are factors of coded k and v.
    """

    ranges: Ranges
    k: Tensor
    v: Tensor
    buffer: Tensor | None = None
    scales: Tensor | None = None

    @staticmethod
    def whole(k: Tensor, v: Tensor) -> "Block":
        return Block(((0, k.shape[2]),), k, v)

    @property
    def nothing(self) -> "Block":
        return Block((), self.k[:, :, :0], self.v[:, :, :0])

    def pack(
        self, ranges: Ranges, make: Callable[[TensorSpec], Tensor] = TensorSpec.empty
    ) -> "Block":
        """Return the block cut to some ranges, in one buffer from ``make``, or itself if nothing is cut."""
        if ranges == self.ranges and self.buffer is not None:
            return self
        spec = PackedSpec.of(ranges, self.k, self.v, scaled=self.scales is not None)
        packed = spec.on(make(spec.buffer_spec))
        if self.scales is not None and packed.scales is not None:
            # Scales hold for any part of the block, so its codes are copied unchanged.
            packed.scales.copy_(self.scales)
        for start, stop in ranges:
            rows = packed.rows(start, stop)
            mine = self.rows(start, stop)
            packed.k[:, :, rows].copy_(self.k[:, :, mine])
            packed.v[:, :, rows].copy_(self.v[:, :, mine])
        return packed

    def to(self, dtype: torch.dtype) -> "Block":
        if self.k.dtype == dtype:
            return self
        other = PackedSpec.of(self.ranges, self.k, self.v, dtype).empty()
        other.k.copy_(self.k)
        other.v.copy_(self.v)
        return other

    def rows(self, start: int, stop: int) -> slice:
        return stored(self.ranges, start, stop)


class RunningSum:
    """Sum of row ranges of a (B, heads, n, size) tensor; a row's first value is written."""

    def __init__(self, into: Tensor) -> None:
        self._into = into
        self._rows = WrittenRows(into.shape[2])

    @staticmethod
    def to_be(result: Tensor, dtype: torch.dtype) -> "RunningSum":
        """Return a sum in ``dtype``, in ``result`` itself if that has the dtype."""
        return RunningSum(
            result if result.dtype == dtype else torch.empty_like(result, dtype=dtype)
        )

    def add(self, rows: slice, value: Tensor) -> None:
        mine = rows_of(self._into, rows)
        # Rows are all new, all written, or a mix if masks of documents cross.
        missing = self._rows.touch(rows)
        if missing == rows.stop - rows.start:
            mine.copy_(value)
            return
        if missing:
            self.running(rows)
        mine.add_(value)

    def running(self, rows: slice) -> Tensor:
        for start, stop in self._rows.fill():
            self._into[:, :, start:stop].zero_()
        return rows_of(self._into, rows)

    def finish(self) -> Tensor:
        return self.running(slice(0, self._into.shape[2]))

    def write(self, rows: slice, into: Tensor) -> None:
        """Write the sum of some rows, 0 if nothing was added."""
        sum_many(into, [self.running(rows)])


class DeferredSum:
    """Sum of row ranges of 16-bit values, which wait and are added in one pass.

    If too many wait, or a value in the dtype of the sum comes, it becomes a ``RunningSum`` in that dtype.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._make = partial(torch.empty, like.shape, dtype=dtype, device=like.device)
        self._waiting, self._sum, self._dtype = Waiting(like.shape[2]), None, dtype

    @staticmethod
    def of(
        like: Tensor, dtype: torch.dtype, into: Tensor | None = None
    ) -> "RunningSum | DeferredSum":
        """Return a sum in ``dtype`` of values ``like`` a tensor: deferred if they are narrower, else in ``into``."""
        if like.dtype != dtype:
            return DeferredSum(like, dtype)
        return RunningSum(torch.empty_like(like) if into is None else into)

    def add(self, rows: slice, value: Tensor) -> None:
        if value.dtype == self._dtype:
            self._fold().add(rows, value)
        elif self._waiting.add(rows, value):
            self._fold()

    def running(self, rows: slice) -> Tensor:
        return self._fold().running(rows)

    def write(self, rows: slice, into: Tensor) -> None:
        for part, values in self._waiting.of(rows):
            before = [] if self._sum is None else [self._sum.running(part)]
            there = slice(part.start - rows.start, part.stop - rows.start)
            sum_many(into[:, :, there], before + [value for (value,) in values])

    def _fold(self) -> RunningSum:
        if self._sum is None:
            self._sum = RunningSum(self._make())
        for rows, values in self._waiting.of(self._waiting.everything):
            for (value,) in values:
                self._sum.add(rows, value)
        self._waiting.clear()
        return self._sum


Sums = RunningSum | DeferredSum


class GradientBlock:
    """Float32 sums of dk and dv for ranges of an owner's tokens; packed like its block if sent."""

    def __init__(
        self, ranges: Ranges, dk: Sums, dv: Sums, buffer: Tensor | None = None
    ) -> None:
        self.ranges, self._dk, self._dv, self._buffer = ranges, dk, dv, buffer

    @staticmethod
    def at_owner(dk: Tensor, dv: Tensor, dtype: torch.dtype) -> "GradientBlock":
        return GradientBlock(
            ((0, dk.shape[2]),),
            RunningSum.to_be(dk, dtype),
            RunningSum.to_be(dv, dtype),
        )

    @staticmethod
    def deferred(k: Tensor, v: Tensor, dtype: torch.dtype) -> "GradientBlock":
        return GradientBlock(
            ((0, k.shape[2]),), DeferredSum.of(k, dtype), DeferredSum.of(v, dtype)
        )

    @staticmethod
    def in_transit(
        spec: PackedSpec, make: Callable[[TensorSpec], Tensor] = TensorSpec.empty
    ) -> "GradientBlock":
        packed = spec.on(make(spec.buffer_spec))
        return GradientBlock(
            spec.ranges, RunningSum(packed.k), RunningSum(packed.v), packed.buffer
        )

    def add(self, rows: slice, dk: Tensor, dv: Tensor) -> None:
        self._dk.add(rows, dk)
        self._dv.add(rows, dv)

    def running(self, rows: slice) -> tuple[Tensor, Tensor]:
        return self._dk.running(rows), self._dv.running(rows)

    def write(self, rows: slice, dk: Tensor, dv: Tensor) -> None:
        self._dk.write(rows, dk)
        self._dv.write(rows, dv)

    def add_block(self, block: Block) -> None:
        for start, stop in block.ranges:
            rows = block.rows(start, stop)
            self.add(
                stored(self.ranges, start, stop),
                block.k[:, :, rows],
                block.v[:, :, rows],
            )

    def finish(self) -> Block:
        return Block(
            self.ranges, *self.running(slice(0, size(self.ranges))), self._buffer
        )


class PartialBlock:
    """Partial of ranges of an owner's queries, out (B, H, n, E) and lse (B, H, n, 1); packed if sent."""

    def __init__(self, block: Block) -> None:
        self._block, self._partial = block, Partial.of(block.k, block.v.squeeze(-1))

    @staticmethod
    def in_transit(
        spec: PackedSpec, make: Callable[[TensorSpec], Tensor] = TensorSpec.empty
    ) -> "PartialBlock":
        return PartialBlock(spec.on(make(spec.buffer_spec)))

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        self._partial.merge(rows, (out, lse))

    def add_block(self, block: Block) -> None:
        for start, stop in block.ranges:
            rows = block.rows(start, stop)
            self.add(
                self._block.rows(start, stop),
                block.k[:, :, rows],
                block.v[:, :, rows].squeeze(-1),
            )

    def running(self, rows: slice) -> tuple[Tensor, Tensor]:
        return self._partial.running(rows)

    def finish(self, sinks: Tensor | None = None) -> Block:
        self._partial.finish(sinks)
        return self._block

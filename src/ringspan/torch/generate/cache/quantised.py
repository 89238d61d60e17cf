"""Keys or values in 8 or 4 bits: ``x ~ scale * code``, ``scale = max |x| / largest code`` per head and K blocks of 64.

At least the last 64 tokens keep full precision: a few can be taken back, and nothing is rounded twice.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from ringspan.core.errors import ConfigError
from ringspan.core.names import CACHE_DTYPE_NAMES
from ringspan.torch.generate.cache.rows import Rows
from ringspan.torch.runtime.dtypes import dtype_named

BLOCK: Final = 64
_LARGEST: Final = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}


def new_rows(dtype: str | None) -> "Rows | QuantisedRows":
    return (
        QuantisedRows(dtype)
        if dtype in _LARGEST
        else Rows(None if dtype is None else dtype_named(dtype))
    )


def check_dtype(dtype: object) -> None:
    if dtype is not None and dtype not in CACHE_DTYPE_NAMES:
        raise ConfigError(
            f"the dtype of a cache must be one of {', '.join(CACHE_DTYPE_NAMES)} or None, got {dtype!r}"
        )


class QuantisedRows:
    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        # Two codes of four bits share a byte.
        self._rows_per_block = BLOCK // 2 if dtype == "int4" else BLOCK
        self._codes, self._scales, self._tail = Rows(), Rows(), Rows()
        self._skipped = 0  # tokens of the first block that were dropped

    def reserve(self, count: int) -> None:
        self._codes.reserve(count // BLOCK * self._rows_per_block)
        self._scales.reserve(count // BLOCK)

    @property
    def count(self) -> int:
        return self._scales.count * BLOCK - self._skipped + self._tail.count

    @property
    def stored(self) -> Tensor:
        """Return the codes of blocks, or all rows while no block is complete."""
        return (self._codes if self._codes.count else self._tail).stored

    @property
    def tensor(self) -> Tensor:
        tail = self._tail.tensor
        if not self._scales.count:
            return tail
        return torch.cat((self._decoded(0)[:, :, self._skipped :], tail), 2)

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes + self._tail.nbytes

    def append(self, new: Tensor) -> None:
        self._tail.append(new)
        full = (self._tail.count - BLOCK) // BLOCK
        if full > 0:
            codes, scales = encoded(
                self._tail.tensor[:, :, : full * BLOCK], self._dtype
            )
            self._codes.append(codes)
            self._scales.append(scales)
            self._tail.cut(full * BLOCK, 0)

    def cut(self, first: int, last: int) -> None:
        """Remove the ``first`` oldest and the ``last`` newest rows.

        At the end, a block that is cut in part is decoded into the tail. At the start, only whole blocks are freed; the
        removed rows of the next block stay in memory and are skipped when it is read.
        """
        if last > self._tail.count:
            self._reopen(-(-(last - self._tail.count) // BLOCK))
        self._tail.cut(0, last)
        dropped = self._skipped + first
        blocks = min(dropped // BLOCK, self._scales.count)
        self._codes.cut(blocks * self._rows_per_block, 0)
        self._scales.cut(blocks, 0)
        self._skipped = dropped - blocks * BLOCK
        if not self._scales.count:
            self._tail.cut(self._skipped, 0)
            self._skipped = 0

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        for rows in (self._codes, self._scales, self._tail):
            rows.change(function)

    def _reopen(self, blocks: int) -> None:
        """Put the last blocks back into the tail, to be rounded again when it has outgrown them."""
        first = self._scales.count - blocks
        assert first >= 0, "no more is cut than there is"
        rows, old = self._decoded(first), self._tail.tensor
        self._codes.cut(0, blocks * self._rows_per_block)
        self._scales.cut(0, blocks)
        self._tail = Rows()
        self._tail.append(torch.cat((rows, old), 2))

    def _decoded(self, first: int) -> Tensor:
        codes = self._codes.tensor[:, :, first * self._rows_per_block :]
        return decoded(codes, self._scales.tensor[:, :, first:], self._dtype).to(
            self._tail.tensor.dtype
        )


def encoded(rows: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """Encode rows (B, G, K * 64, D) as codes of that shape, in 4 bits (B, G, K * 32, D), and scales (B, G, K, 1)."""
    blocks = rows.float().unflatten(2, (-1, BLOCK))
    scales = blocks.abs().amax((3, 4), keepdim=True) / _LARGEST[dtype]
    codes = blocks / scales.masked_fill(scales == 0, 1)
    if dtype == "fp8":
        codes = codes.to(torch.float8_e4m3fn).view(torch.uint8)
    elif dtype == "int8":
        codes = codes.round().to(torch.int8)
    else:
        low, high = (codes.round() + 8).to(torch.uint8).tensor_split(2, dim=3)
        codes = low | high << 4
    return codes.flatten(2, 3), scales[..., 0, 0].unsqueeze(-1)


def decoded(codes: Tensor, scales: Tensor, dtype: str) -> Tensor:
    blocks = codes.unflatten(2, (scales.shape[2], -1))
    if dtype == "fp8":
        numbers = blocks.view(torch.float8_e4m3fn).float()
    elif dtype == "int8":
        numbers = blocks.float()
    else:
        numbers = torch.cat((blocks & 15, blocks >> 4), 3).float() - 8
    return (numbers * scales.unsqueeze(-1)).flatten(2, 3)

"""Split of a batch's sequences: all by one layout, or each by its documents'."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.balanced import batch_layout
from ringspan.core.geometry.layout import Layout
from ringspan.core.names import BatchLayoutName
from ringspan.torch.attention.traced import rows_of
from ringspan.torch.data.sharding import shard, unshard
from ringspan.torch.transport.digest import digest_integers


@dataclass(frozen=True)
class BatchLayout:
    """Layout of each sequence of a batch, or one for all, of equal S, N and T."""

    rows: tuple[Layout, ...]

    @classmethod
    def of(
        cls, name: BatchLayoutName, length: int, ranks: int, lengths: Tensor | None, folds: int = 1
    ) -> "BatchLayout":
        """Make a layout for these documents or trees (``rows_of``); UnsupportedError for ``balanced`` without."""
        if name != "balanced":
            return cls((batch_layout(name, length, ranks, folds=folds),))
        if lengths is None:
            raise UnsupportedError("layout 'balanced' needs document_lengths; make the batch with rs.shard_batch")
        rows = rows_of(lengths)
        rows = rows[:1] if len(set(rows)) == 1 else rows
        return cls(tuple(batch_layout(name, length, ranks, row) for row in rows))

    @property
    def shared(self) -> Layout:
        return self.rows[0]

    def of_row(self, row: int) -> Layout:
        return self.rows[row if len(self.rows) > 1 else 0]

    def positions(self, rank: int) -> Tensor:
        """Return the global positions of a rank's tokens, (B, T), or (1, T) if sequences share a layout."""
        return torch.stack([torch.from_numpy(layout.positions(rank)) for layout in self.rows])

    def digest(self, rank: int) -> Tensor:
        return digest_integers(self.positions(rank))

    def shard(self, x: Tensor, rank: int, *, value: float = 0) -> Tensor:
        """Return this rank's part (B, T, ...) of a whole tensor (B, S, ...); differentiable."""
        if len(self.rows) == 1:
            return shard(x, self.shared, rank, 1, value=value)
        parts = zip(x.split(1), self.rows, strict=True)
        return torch.cat([shard(part, layout, rank, 1, value=value) for part, layout in parts])

    def unshard(self, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the whole tensor (B, S, ...) from every rank's part (B, T, ...); not differentiable."""
        if len(self.rows) == 1:
            return unshard(x, self.shared, group, 1)
        stored = unshard(x, Layout("contiguous", self.shared.padded_length, self.shared.ranks), group, 1)
        orders = [torch.from_numpy(layout.inverse[: layout.length]).to(x.device) for layout in self.rows]
        return torch.stack([part.index_select(0, order) for part, order in zip(stored, orders, strict=True)])


class Unsharded(torch.autograd.Function):
    """Differentiable ``BatchLayout.unshard``; the gradient, as with ``Sum``, is each rank's part, counted once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: BatchLayout, group: dist.ProcessGroup) -> Tensor:
        ctx.layout, ctx.rank = layout, dist.get_rank(group)
        return layout.unshard(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.layout.shard(gradients[0], ctx.rank), None, None

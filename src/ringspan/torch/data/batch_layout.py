"""Conversion between whole tensors and ranks' parts; a batch's sequences share a layout, or each has its documents'."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.arguments import check_sharding
from ringspan.core.errors import LayoutError, UnsupportedError
from ringspan.core.geometry.balanced import batch_layout
from ringspan.core.geometry.layout import Layout
from ringspan.core.names import BatchLayoutName
from ringspan.torch.engine.attention.arguments import check_plain, find_group
from ringspan.torch.engine.attention.traced import rows_of
from ringspan.torch.engine.transport.agreement import agree
from ringspan.torch.engine.transport.digest import digest_integers


def shard(
    x: Tensor, layout: Layout, rank: int, dim: int, *, value: float = 0
) -> Tensor:
    """Return this rank's ``pad(x, value)[positions(rank)]`` along ``dim``; differentiable.

    Raises:
        UnsupportedError: ``x`` is not a plain tensor.
        LayoutError: no layout, or no rank of it; or ``x`` does not have ``layout.length`` entries along ``dim``.
    """
    check_plain("x", x)
    check_sharding(x.shape, layout, dim)
    if x.shape[dim] != layout.length:
        raise LayoutError(
            f"dimension {dim} has {x.shape[dim]} entries, but must have the layout's {layout.length}"
        )
    missing = layout.padded_length - layout.length
    if missing:
        shape = list(x.shape)
        shape[dim] = missing
        x = torch.cat((x, x.new_full(shape, value)), dim)
    return x.index_select(dim, torch.from_numpy(layout.positions(rank)).to(x.device))


def unshard(
    x: Tensor, layout: Layout, group: dist.ProcessGroup | DeviceMesh | None, dim: int
) -> Tensor:
    """Gather the whole tensor, in order and without padding, from every rank's part; not differentiable.

    Raises:
        UnsupportedError: ``x`` is not a plain tensor, or ``group`` is not a group of this rank.
        LayoutError: no layout, or of another number of ranks, or of other ``tokens_per_rank`` than ``x`` along ``dim``.
        PeerMismatch: the ranks have other shapes, dtypes or layouts; on every rank.
    """
    check_plain("x", x)
    check_sharding(x.shape, layout, dim)
    group = find_group(group)
    if x.shape[dim] != layout.tokens_per_rank:
        raise LayoutError(
            f"dimension {dim} has {x.shape[dim]} entries, but must have the layout's {layout.tokens_per_rank} per rank"
        )
    ranks = dist.get_world_size(group) if group is not None else 1
    if layout.ranks not in (1, ranks):
        raise LayoutError(
            f"the layout is for {layout.ranks} ranks, the group has {ranks}; make it for {ranks}"
        )
    if layout.ranks > 1:
        what = (
            f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}, dimension {dim}"
        )
        agree(
            group,
            {
                "unshard": what,
                "layout": f"{layout.fingerprint} of {layout.length} tokens",
            },
        )
    x = x.detach().movedim(dim, 0).contiguous()
    parts = [torch.empty_like(x) for _ in range(layout.ranks)]
    if layout.ranks == 1:
        parts = [x]
    else:
        dist.all_gather(parts, x, group=group)
    order = torch.from_numpy(layout.inverse[: layout.length]).to(x.device)
    return torch.cat(parts).index_select(0, order).movedim(0, dim)


@dataclass(frozen=True)
class BatchLayout:
    """Layout of each sequence of a batch, or one for all, of equal S, N and T."""

    rows: tuple[Layout, ...]

    @classmethod
    def of(
        cls,
        name: BatchLayoutName,
        length: int,
        ranks: int,
        lengths: Tensor | None,
        folds: int = 1,
    ) -> "BatchLayout":
        """Return the layout for these documents or trees (``rows_of``).

        UnsupportedError for ``balanced`` without any.
        """
        if name != "balanced":
            return cls((batch_layout(name, length, ranks, folds=folds),))
        if lengths is None:
            raise UnsupportedError(
                "layout 'balanced' needs document_lengths; make the batch with rs.shard_batch"
            )
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
        return torch.stack(
            [torch.from_numpy(layout.positions(rank)) for layout in self.rows]
        )

    def digest(self, rank: int) -> Tensor:
        return digest_integers(self.positions(rank))

    def shard(self, x: Tensor, rank: int, *, value: float = 0) -> Tensor:
        """Return this rank's part (B, T, ...) of a whole tensor (B, S, ...); differentiable."""
        if len(self.rows) == 1:
            return shard(x, self.shared, rank, 1, value=value)
        parts = zip(x.split(1), self.rows, strict=True)
        return torch.cat(
            [shard(part, layout, rank, 1, value=value) for part, layout in parts]
        )

    def unshard(self, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the whole tensor (B, S, ...) from every rank's part (B, T, ...); not differentiable."""
        if len(self.rows) == 1:
            return unshard(x, self.shared, group, 1)
        stored = unshard(
            x,
            Layout("contiguous", self.shared.padded_length, self.shared.ranks),
            group,
            1,
        )
        orders = [
            torch.from_numpy(layout.inverse[: layout.length]).to(x.device)
            for layout in self.rows
        ]
        return torch.stack(
            [
                part.index_select(0, order)
                for part, order in zip(stored, orders, strict=True)
            ]
        )


class Unsharded(torch.autograd.Function):
    """Differentiable ``BatchLayout.unshard``; the gradient, as with ``Sum``, is each rank's part, counted once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layout: BatchLayout, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.layout, ctx.rank = layout, dist.get_rank(group)
        return layout.unshard(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.layout.shard(gradients[0], ctx.rank), None, None

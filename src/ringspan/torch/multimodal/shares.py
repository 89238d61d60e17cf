"""Distribution of embeddings: the rank that makes each, and its way to its token."""

# B batch, S global tokens, T local tokens, N ranks, R embeddings of a batch, in token order.

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringspan.torch.data.batch_layout import BatchLayout

Integers = NDArray[np.int64]


def share_out(costs: Sequence[int], ranks: int) -> list[range]:
    """Assign consecutive units to ranks by each one's middle, at about equal cost."""
    ends = np.cumsum(np.array(costs, dtype=np.float64))
    total = float(ends[-1]) if len(costs) else 0.0
    owners = ((ends - np.array(costs) / 2) * ranks / (total or 1.0)).astype(np.int64).clip(max=ranks - 1)
    bounds = np.searchsorted(owners, np.arange(ranks + 1)).tolist()
    return [range(bounds[rank], bounds[rank + 1]) for rank in range(ranks)]


class Plan(NamedTuple):
    sent: Tensor
    """Indices of its own embeddings, rank by rank."""
    send_counts: list[int]
    receive_counts: list[int]
    order: Tensor
    """Indices of received embeddings, in the order of local tokens (B, T)."""


def make_plan(places: Integers, split: BatchLayout, rank: int, made: Sequence[int]) -> Plan:
    """Plan one rank's exchange: ``places`` (R, 2) of all embeddings are sorted (sequence, position)."""
    ranks, tokens = split.shared.ranks, split.shared.tokens_per_rank
    tables = np.stack([layout.inverse for layout in split.rows])
    stored = tables[places[:, 0] if len(tables) > 1 else 0, places[:, 1]]
    holders, local = stored // tokens, places[:, 0] * tokens + stored % tokens
    owners = np.repeat(np.arange(ranks), made)
    first = sum(made[:rank])
    mine = slice(first, first + made[rank])
    here = holders == rank
    arriving = np.lexsort((local[here], owners[here]))
    return Plan(
        torch.from_numpy(np.lexsort((local[mine], holders[mine]))),
        np.bincount(holders[mine], minlength=ranks).tolist(),
        np.bincount(owners[here], minlength=ranks).tolist(),
        torch.from_numpy(np.argsort(local[here][arriving])),
    )


def exchange(rows: Tensor, plan: Plan, group: dist.ProcessGroup) -> Tensor:
    """Return the local tokens' embeddings in order; gradients go back to their makers."""
    sent = rows.index_select(0, plan.sent.to(rows.device))
    if dist.get_world_size(group) > 1:
        sent = _Exchanged.apply(sent, plan.send_counts, plan.receive_counts, group)
    return sent.index_select(0, plan.order.to(rows.device))


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _traded(rows, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _traded(gradients[0], ctx.receive, ctx.send, ctx.group), None, None, None


def _traded(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty((sum(receive), rows.shape[1]))
    # As bytes: not every backend sends every dtype.
    dist.all_to_all_single(received.view(torch.uint8), rows.contiguous().view(torch.uint8), receive, send, group=group)
    return received

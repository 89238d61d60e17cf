"""Attention of new tokens to the keys of a cache that an index chooses, split over the ranks of a ring.

Many new tokens are split over the ranks and fetch what they see, as in training. Few are on every rank: each finds the
best keys of its own share, all agree on the best of these, and partials over each share's are merged.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.core.arguments import SPLIT_FROM_TOKENS
from ringspan.core.geometry.layout import CustomLayout
from ringspan.torch.engine.attention.cached import Reach, Turn, merged
from ringspan.torch.engine.attention.request import Request, without_autocast
from ringspan.torch.engine.transport.agreement import one_at_a_time
from ringspan.torch.mechanisms.chosen_keys.chosen import (
    Blocks,
    IndexInputs,
    attend,
    candidates,
    choose_blocks,
    first_of,
)
from ringspan.torch.mechanisms.chosen_keys.indexed import attend_fetched
from ringspan.torch.mechanisms.chosen_keys.windows import Row, passing_tokens, visible


def attend_to_cache(
    turn: Turn, reach: Reach, q: Tensor, kv: Tensor, index: IndexInputs | None, chosen: Tensor | None, *, values: slice,
    scale: float, sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend from q (B, H, n, D) to chosen keys of all ranks, given this rank's share (B, M, C) of them.

    Give an ``index``, with the keys of the share, or what it has ``chosen``. Returns out (B, H, n, E) in q's dtype, and
    global positions of each query's keys (B, n, k), -1 for none.
    """
    if index is not None:
        index = index._replace(topk=min(index.topk, reach.keys.length))
    return (_fetching if _fetches(turn) else _merging)(
        turn, reach, q, kv, index, chosen, values, scale, sinks
    )


def _fetches(turn: Turn) -> bool:
    # A single rank splits nothing, but many queries need the chunks of the other path to bound their scores.
    return turn.is_split or (
        turn.new.ranks == 1 and len(turn.kept) >= SPLIT_FROM_TOKENS
    )


def _fetching(
    turn: Turn, reach: Reach, q: Tensor, kv: Tensor, index: IndexInputs | None, chosen: Tensor | None, values: slice,
    scale: float, sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ``attend_to_cache`` for split queries: each row of the batch fetches all keys that local queries see."""
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    each = len(q) // len(reach.masks)  # some sequences, or the key heads of one
    for number, row in enumerate(_rows(turn, reach, q.device)):
        part = slice(number * each, (number + 1) * each)
        of_row = None if index is None else index.of_rows(part)
        given = None if chosen is None else chosen[part]
        with passing_tokens(kv[part], turn.group) as exchange:
            results.append(
                attend_fetched(
                    row,
                    exchange,
                    q[part],
                    kv[part],
                    sinks,
                    of_row,
                    given,
                    values,
                    scale,
                )[:3]
            )
    out, _, found = (torch.cat(each) for each in zip(*results, strict=True))
    return out, found if chosen is None else chosen


def _merging(
    turn: Turn, reach: Reach, q: Tensor, kv: Tensor, index: IndexInputs | None, chosen: Tensor | None, values: slice,
    scale: float, sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ``attend_to_cache`` for queries that every rank has.

    The ranks agree on the best keys of all shares. Each attends to the chosen keys of its own share, and the partials
    are merged.
    """
    with one_at_a_time(turn.group):
        if index is not None:
            chosen = best_of_shares(
                index, *_share(reach, turn.queries, turn.rank, q.device), turn.group
            )
        assert chosen is not None, "it is chosen here, or was before"
        positions = torch.from_numpy(reach.keys.positions(turn.rank)).to(q.device)
        out, lse = attend(q, kv, _columns(chosen, positions), values, scale, None)
        return merged(out, lse, sinks, turn.group).to(q.dtype), chosen


def attend_to_both(
    turn: Turn,
    near: Request,
    kind: object,
    entries: Sequence[Tensor],
    columns: Sequence[Tensor],
    sinks: Tensor | None,
) -> Tensor:
    """Attend to keys near queries (B, H, n, D), and to each row's columns (b, n, k) of entries (b, m, D).

    Entries are this rank's share if each rank computes all queries, and all entries if queries are split.
    """
    q, scale = near.q, near.scale
    assert scale is not None, "a module with an index gives its own"
    parts = zip(q.split([len(each) for each in entries]), entries, columns, strict=True)
    far = [attend(*part, slice(0, q.shape[-1]), scale, None) for part in parts]
    partials = turn.partial(near, kind), tuple(map(torch.cat, zip(*far, strict=True)))
    lse = torch.logaddexp(*(lses for _, lses in partials))
    finite = lse.masked_fill(lse == -torch.inf, 0)  # nothing to see: padding
    out = sum(
        (each * (lses - finite).exp()[..., None] for each, lses in partials),
        torch.zeros_like(lse[..., None]),
    )
    if not turn.is_split and turn.new.ranks > 1:
        return merged(out, lse, sinks, turn.group).to(q.dtype)
    if sinks is not None:
        out = (
            out
            * (lse - torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])).exp()[
                ..., None
            ]
        )
    return out.to(q.dtype)


def best_of_shares(
    index: IndexInputs, positions: Tensor, sees: Tensor, group: dist.ProcessGroup | None
) -> Tensor:
    """Return the positions (B, n, topk) that queries choose from all ranks' keys; -1 for none.

    ``index``, ``positions`` and ``sees`` describe this rank's share of the keys.
    """
    mine = candidates(index, positions, sees)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return first_of(torch.cat(every, -1), index.topk)


def _rows(turn: Turn, reach: Reach, device: torch.device) -> list[Row]:
    return [
        Row(mask.spec, turn.queries, turn.rank, device, reach.keys)
        for mask in reach.masks
    ]


def choose_blocks_of_cache(
    turn: Turn, reach: Reach, q: Tensor, k: Tensor, blocks: Blocks
) -> Tensor:
    """Return positions (B, H, n, topk size), int32, of the keys that heads of q (B, n, H, D) choose; -1 for none.

    k (B, M, D) are this rank's share. A block may lie on several ranks, and begins with its row's first real token.
    """
    rows = _rows(turn, reach, q.device)
    if _fetches(turn):
        parts = zip(
            rows,
            q.split(len(q) // len(rows)),
            k.split(len(q) // len(rows)),
            strict=True,
        )
        return torch.cat([_blocks_of_fetched(turn, *part, blocks) for part in parts])
    _, sees = _share(reach, turn.queries, turn.rank, q.device)
    numbers, seen = (
        x.expand(len(q), -1) for x in _numbers(reach, turn.queries, turn.rank, q.device)
    )
    with without_autocast(q):
        products = torch.einsum("bthd,bmd->bthm", q.float(), k.float()).masked_fill_(
            ~sees[:, :, None], -torch.inf
        )
    scores = products.new_full(
        (*products.shape[:-1], 1 + int(seen.max()) // blocks.size), -torch.inf
    )
    of_blocks = (
        (numbers // blocks.size)
        .clamp(max=scores.shape[-1] - 1)[:, None, None]
        .expand_as(products)
    )
    scores.scatter_reduce_(-1, of_blocks, products, "amax")
    with one_at_a_time(turn.group):
        dist.all_reduce(scores, dist.ReduceOp.MAX, group=turn.group)
    chosen = blocks.best(scores, seen[..., None, None])
    parts = zip(rows, chosen.split(len(q) // len(rows)), strict=True)
    return (
        torch.cat([row.position_of(part) for row, part in parts])
        .to(torch.int32)
        .transpose(1, 2)
        .contiguous()
    )


def _blocks_of_fetched(
    turn: Turn, row: Row, q: Tensor, k: Tensor, blocks: Blocks
) -> Tensor:
    fetch, first, stop = visible(row)
    with passing_tokens(k, turn.group) as exchange:
        keys = fetch.start(k, exchange).finish()
    return fetch.at(choose_blocks(q, keys, first, stop, blocks))


@lru_cache(maxsize=4)
def _numbers(
    reach: Reach, queries: CustomLayout, rank: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return numbers of a rank's keys among the real ones (B, M), and how many of these queries see (B, n)."""
    rows = [Row(mask.spec, queries, rank, device, reach.keys) for mask in reach.masks]
    held, before = reach.keys.positions(rank), queries.positions(0) + 1
    counts = [
        np.stack([row.real_before(positions) for row in rows])
        for positions in (held, before)
    ]
    numbers, seen = (torch.from_numpy(each).to(device) for each in counts)
    return numbers, seen


@lru_cache(maxsize=4)  # for all layers of a pass
def _share(
    reach: Reach, queries: CustomLayout, rank: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return positions of a rank's keys (M,), and which of them queries see (B, n, M), B of 1 if all rows agree."""
    held = reach.keys.positions(rank)
    sees = np.stack([mask.dense(queries.positions(0), held) for mask in reach.masks])
    return torch.from_numpy(held).to(device), torch.from_numpy(sees).to(device)


def _columns(chosen: Tensor, positions: Tensor) -> Tensor:
    """Return the columns (B, n, most) of a share's keys at positions (M,) that are chosen (B, n, k); -1 for none."""
    columns = torch.searchsorted(positions, chosen)
    columns.masked_fill_(positions[columns.clamp(max=len(positions) - 1)] != chosen, -1)
    most = int((columns >= 0).sum(-1).max())
    return columns.topk(max(1, most), -1).values

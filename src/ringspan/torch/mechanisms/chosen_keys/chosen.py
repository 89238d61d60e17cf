"""An index's choice of k of n keys, and attention to them, on one device and in chunks of queries.

The order is total, by float32 score, then lower position, both in one integer, so every rank, chunk and recomputation
chooses the same keys, even of equal scores (ReLU makes many zeros).
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ringspan.core.selection import SCORES_AT_ONCE, position_bytes
from ringspan.torch.engine.attention.request import without_autocast

_PRODUCTS_AT_ONCE: Final = 2**21
"""Products of all heads of the index before they are summed."""
_NUMBERS_AT_ONCE: Final = 2**21
"""Numbers of chosen keys that are copied for a chunk of queries."""
_LAST: Final = 2**31 - 1
_NEVER: Final = torch.iinfo(torch.int64).min
"""Below the order of every score, -inf and NaN included."""


class IndexInputs(NamedTuple):
    """Inputs of an index's scores, ``sum_h weights_h relu(scale q_h k)``."""

    q: Tensor
    """Queries (B, T, H, D)."""
    k: Tensor
    """Keys (B, n, D)."""
    weights: Tensor
    """Weights of the heads, float32 (B, T, H)."""
    scale: float
    topk: int
    """Keys that a query attends to at most; 0 for all."""
    real: Tensor | None = None
    """Queries (B, T) whose attention it learns, all but padding; None if it does not learn."""

    def of_rows(self, rows: slice) -> "IndexInputs":
        """Return the inputs for some sequences of the batch."""
        real = None if self.real is None else self.real[rows]
        return self._replace(
            q=self.q[rows], k=self.k[rows], weights=self.weights[rows], real=real
        )


class Visible(NamedTuple):
    """Every key in [first, stop) (T,) of each query, instead of listed columns."""

    first: Tensor
    stop: Tensor


def ordered(scores: Tensor, columns: Tensor) -> Tensor:
    """Return integers in order of score, then descending column; the largest is chosen first."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it equals
    rising = torch.where(bits < 0, bits ^ _LAST, bits).to(torch.int64)
    return rising * (_LAST + 1) + _turned(columns)


def _turned(columns: Tensor) -> Tensor:
    """Reverse the order of columns; its own inverse."""
    return _LAST - columns


def choose(index: IndexInputs, first: Tensor, stop: Tensor) -> Tensor:
    """Return the columns (B, T, k), int32, that each query chooses of the keys [first, stop) (T,); -1 for none."""
    chosen = all_seen(first, stop, index.topk).repeat(len(index.q), 1, 1)
    counts = stop - first
    for rows in _chunks(len(first), max(1, int(counts.max())), SCORES_AT_ONCE, 128):
        for row in range(len(index.q) if int(counts[rows].max()) > index.topk else 0):
            chosen[row, rows] = _best(index, row, rows, first[rows], stop[rows]).to(
                torch.int32
            )
    return chosen


def all_seen(first: Tensor, stop: Tensor, topk: int) -> Tensor:
    """Return the first ``topk`` columns (1, T, k), int32, of each query's [first, stop); -1 past its last."""
    columns = first[:, None] + torch.arange(
        topk, dtype=torch.int32, device=first.device
    )
    return columns.masked_fill_(columns >= stop[:, None], -1)[None]


def _best(
    index: IndexInputs, row: int, rows: slice, first: Tensor, stop: Tensor
) -> Tensor:
    """Return the columns (c, topk) that a chunk of one sequence's queries chooses of its keys [first, stop) (c,).

    Scores cover only the columns that some query of the chunk sees.
    """
    begin, end = int(first[stop > first].min()), int(stop.max())
    columns = torch.arange(begin, end, device=first.device)
    scores = _scores(
        index.q[row, rows].float(),
        index.k[row, begin:end],
        index.weights[row, rows],
        index.scale,
    )
    order = ordered(scores, columns)
    order.masked_fill_((columns < first[:, None]) | (columns >= stop[:, None]), _NEVER)
    return first_of(order, index.topk)


def candidates(index: IndexInputs, positions: Tensor, sees: Tensor) -> Tensor:
    """Return each query's best keys (B, T, topk), as ``ordered``; it ``sees`` some (B, T, n) at positions (n,)."""
    found = []
    for q, k, weights, seen in zip(
        index.q, index.k, index.weights, sees.expand(len(index.q), -1, -1), strict=True
    ):
        order = ordered(
            _scores(q.float(), k, weights, index.scale), positions
        ).masked_fill_(~seen, _NEVER)
        best = order.topk(min(index.topk, len(k)), sorted=False).values
        found.append(
            torch.nn.functional.pad(
                best, (0, index.topk - best.shape[-1]), value=_NEVER
            )
        )
    return torch.stack(found)


def packed(positions: Tensor, length: int) -> Tensor:
    """Return positions (..., k) below a length, -1 for none, in the bytes that they need: uint8 (..., k, bytes)."""
    size = position_bytes(length)
    return (
        positions.to(torch.int32)[..., None].view(torch.uint8)[..., :size].contiguous()
    )


def unpacked(packed: Tensor) -> Tensor:
    """Return the positions (..., k), int32."""
    size = packed.shape[-1]
    if size == 4:
        return packed.view(torch.int32)[..., 0]
    whole = packed.new_zeros(*packed.shape[:-1], 4)
    whole[..., :size] = packed
    positions = whole.view(torch.int32)[..., 0]
    return positions.masked_fill_(positions == (1 << 8 * size) - 1, -1)


def first_of(order: Tensor, topk: int) -> Tensor:
    """Return the columns of the ``topk`` largest (..., topk), -1 if there are fewer."""
    best = order.topk(min(topk, order.shape[-1]), sorted=False).values
    found = _turned(best & _LAST)
    found.masked_fill_(best == _NEVER, -1)
    return torch.nn.functional.pad(found, (0, topk - found.shape[-1]), value=-1)


class Blocks(NamedTuple):
    """Blocks of keys: a block's score is the largest product of the query with one of its keys."""

    size: int
    topk: int
    always: int
    """Number of blocks that are always chosen, counted back from the query's own."""

    def best(self, scores: Tensor, seen: Tensor) -> Tensor:
        """Return the numbers of keys (..., T, H, topk size), -1 for none, by blocks' scores (..., T, H, n).

        -inf for blocks that a query does not see; of the keys in order it sees the first ``seen`` (..., T, 1, 1).
        """
        for back in range(self.always):
            own = ((seen - 1) // self.size - back).clamp(min=0)
            scores.scatter_(-1, own.expand(*scores.shape[:-1], 1), torch.inf)
        order = ordered(scores, torch.arange(scores.shape[-1], device=scores.device))
        found = first_of(order.masked_fill_(scores == -torch.inf, _NEVER), self.topk)[
            ..., None
        ]
        keys = found * self.size + torch.arange(self.size, device=scores.device)
        return keys.masked_fill_((found < 0) | (keys >= seen[..., None]), -1).flatten(
            -2
        )


def choose_blocks(
    q: Tensor, k: Tensor, first: Tensor, stop: Tensor, blocks: Blocks
) -> Tensor:
    """Return the columns (B, H, T, topk size), int32, of the keys of k (B, n, D) that heads of q (B, T, H, D) choose.

    Blocks are counted from the first of a query's keys [first, stop); -1 for no key.
    """
    size = blocks.size
    chosen = torch.full(
        (*q.shape[:3], blocks.topk * size), -1, dtype=torch.int32, device=q.device
    )
    for rows in _alike(first, q.shape[2] * max(1, int((stop - first).max()))):
        begin, end = int(first[rows.start]), int(stop[rows].max())
        seen = (stop[rows] - begin).long()[:, None, None]
        for row in range(len(q) if end > begin else 0):
            # Rounded products would often be equal, and the choice among them arbitrary.
            with without_autocast(q):
                scores = torch.einsum(
                    "thd,nd->thn", q[row, rows].float(), k[row, begin:end].float()
                )
            scores.masked_fill_(
                torch.arange(end - begin, device=q.device) >= seen, -torch.inf
            )
            scores = torch.nn.functional.pad(
                scores, (0, -scores.shape[-1] % size), value=-torch.inf
            )
            keys = blocks.best(scores.unflatten(-1, (-1, size)).amax(-1), seen)
            chosen[row, rows] = torch.where(keys < 0, -1, keys + begin).to(torch.int32)
    return chosen.transpose(1, 2).contiguous()


def _alike(first: Tensor, each: int) -> Iterator[slice]:
    """Yield chunks of consecutive queries that have the same first key."""
    at = 0
    for count in torch.unique_consecutive(first, return_counts=True)[1].tolist():
        for rows in _chunks(count, each, SCORES_AT_ONCE, 128):
            yield slice(at + rows.start, at + rows.stop)
        at += count


def _scores(q: Tensor, k: Tensor, weights: Tensor, scale: float) -> Tensor:
    """Return scores (c, n) in float32, under autocast too; in tiles of keys to save memory."""
    tokens, heads, size = q.shape
    scores = q.new_empty(tokens, len(k))
    with without_autocast(q):
        for keys in _chunks(len(k), tokens * heads, _PRODUCTS_AT_ONCE, len(k)):
            products = (
                (q.reshape(-1, size) @ k[keys].float().T)
                .view(tokens, heads, -1)
                .mul_(scale)
                .relu_()
            )
            scores[:, keys] = torch.bmm(weights[:, None].float(), products)[:, 0]
    return scores


def attend(
    q: Tensor,
    keys: Tensor,
    columns: Tensor | Visible,
    values: slice,
    scale: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend from q (B, H, T, D) to its columns (B, T, k) of keys (B, n, C), shared by all heads.

    A key is its first D numbers, its value the numbers in ``values``. Returns out (B, H, T, E) in q's dtype and lse
    (B, H, T) in float32, or float64 for float64; 0 and -inf for a query without keys, unless it has a sink.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:3], values.stop - values.start)
    lse = q.new_empty(q.shape[:3], dtype=dtype)
    for row, rows, here in in_chunks(columns, keys):
        scores, chosen = scored(q[row, :, rows], keys[row], here, scale, dtype)
        total = torch.logsumexp(scores, -1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.to(dtype))
        p = probabilities(scores, total)
        out[row, :, rows] = (p.to(q.dtype) @ chosen[..., values]).transpose(0, 1)
        lse[row, :, rows] = total.T
    return out, lse


def attend_backward(
    dout: Tensor, q: Tensor, keys: Tensor, columns: Tensor | Visible, values: slice, scale: float, out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dq like q, and the gradient of keys (B, n, C) in lse's dtype."""
    dtype, size = lse.dtype, q.shape[-1]
    dq, dkeys = torch.empty_like(q), keys.new_zeros(keys.shape, dtype=dtype)
    for row, rows, here in in_chunks(columns, keys):
        scores, chosen = scored(q[row, :, rows], keys[row], here, scale, dtype)
        p = probabilities(scores, lse[row, :, rows].T)
        nothing = (here < 0).all(-1)[:, None, None]  # padding, which may be anything
        given, mine = (
            x[row, :, rows].transpose(0, 1).masked_fill(nothing, 0) for x in (dout, q)
        )
        delta = (given.to(dtype) * out[row, :, rows].transpose(0, 1).to(dtype)).sum(
            -1, keepdim=True
        )
        ds = (p * ((given @ chosen[..., values].mT).to(dtype) - delta) * scale).to(
            q.dtype
        )
        dq[row, :, rows] = (ds @ chosen[..., :size]).transpose(0, 1)
        dchosen = chosen.new_zeros(chosen.shape, dtype=dtype)
        dchosen[..., :size] = ds.mT @ mine
        dchosen[..., values] += p.to(q.dtype).mT @ given
        dkeys[row].index_add_(0, here.clamp(min=0).flatten(), dchosen.flatten(0, 1))
    return dq, dkeys


def scored(
    q: Tensor, keys: Tensor, columns: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return scores (c, H, k) and chosen keys (c, k, C) of queries (H, c, D)."""
    chosen = keys.index_select(0, columns.clamp(min=0).flatten()).view(
        *columns.shape, -1
    )
    none = columns < 0
    if bool(none.any()):  # zeros, since a weight of 0 times padding may be NaN
        chosen.masked_fill_(none[..., None], 0)
    scores = (q.transpose(0, 1) @ chosen[..., : q.shape[-1]].mT).to(dtype) * scale
    return scores.masked_fill_(none[:, None], -torch.inf), chosen


def probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    return (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp_()


def in_chunks(
    columns: Tensor | Visible, keys: Tensor
) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield a row of the batch, a chunk of its queries, and their columns (c, k)."""
    counts = (
        [columns.shape[-1]]
        if isinstance(columns, Tensor)
        else (columns.stop - columns.first).tolist()
    )
    tokens = columns.shape[1] if isinstance(columns, Tensor) else len(counts)
    for row in range(len(keys)):
        for rows in _chunks(
            tokens, max(1, *counts) * keys.shape[-1], _NUMBERS_AT_ONCE, tokens
        ):
            if isinstance(columns, Tensor):
                yield row, rows, columns[row, rows]
            else:
                yield (
                    row,
                    rows,
                    all_seen(
                        columns.first[rows], columns.stop[rows], max(1, *counts[rows])
                    )[0],
                )


def _chunks(count: int, each: int, at_once: int, most: int) -> Iterator[slice]:
    size = max(1, min(most, at_once // each))
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))

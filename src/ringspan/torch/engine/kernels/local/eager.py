"""Blockwise attention in plain PyTorch: any tile, dtype, device and pair of head sizes, in bounded memory.

FlashAttention (Dao et al. 2022) over power-of-two chunks; scores are ``Scores``'s times log2(e), since ``exp2`` takes
-inf at full speed, a CPU's ``exp`` ten times as long. Runs if no fast kernel serves, or if it is faster on a CPU.
P = H / G query heads per group; g key/value heads of one sequence at a time, n rows, m keys.
"""

from collections.abc import Iterator
from itertools import pairwise
from math import gcd, log
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from ringspan.core.geometry.tile import Tile
from ringspan.core.schedule.kernel_launches import (
    SHORT,
    KernelLaunch,
    KernelLaunches,
    bands,
)
from ringspan.torch.engine.kernels.contract import ANY, BackwardInputs, Scores
from ringspan.torch.engine.kernels.device import ChunkSize, rules_of
from ringspan.torch.engine.kernels.partials.merge import merge_into

_LOG2E: Final = 1 / log(2)
_LOWEST: Final = -1e30  # the maximum of a row that has seen no key: finite, so that no difference of two is NaN
_FAINTEST: Final = -100.0  # the smallest weight as a power of two: 1e-30
_UNIT: Final = 16  # rows and keys: CPUs multiply matrices of odd widths a fifth slower


class Eager:
    """Kernel that holds one chunk of scores at a time and skips chunks outside of the band."""

    name = "eager"
    memory = ANY
    adds_in_place: Literal[True] = True

    def why_not(self, q: Tensor, v: Tensor, scores: Scores) -> str | None:
        return None

    def launches(self, tiles: tuple[Tile, ...]) -> KernelLaunches:
        return bands(tiles)

    def forward_into(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        launch: KernelLaunch,
        scores: Scores,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Merge the launch's attention into the running out (B, H, rows, E) and lse (B, H, rows), a chunk at a time."""
        size = _chunk_size(q, launch.tile)
        for one, heads, kv_heads in self.heads(q, k, launch.tile, size):
            keys, head_scores = (
                (k[one, kv_heads], v[one, kv_heads]),
                scores.heads(heads),
            )
            for rows, chunks in self.chunks(launch.tile, size):
                queries = _as_rows(q[one, heads, rows], kv_heads, lse.dtype) * _factor(
                    scores
                )
                new_out, new_lse = _partial(
                    queries, *keys, launch.tile, rows, chunks, head_scores
                )
                into, lse_into = out[one, heads, rows], lse[one, heads, rows]
                merge_into(
                    into,
                    lse_into,
                    new_out.view(into.shape),
                    new_lse.view(lse_into.shape),
                )

    def backward_into(
        self,
        given: BackwardInputs,
        launch: KernelLaunch,
        scores: Scores,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        """Add the launch's share to the running dq, dk and dv, with probabilities recomputed from the global lse."""
        dout, q, k, v, out, lse = given
        dtype, size = lse.dtype, _chunk_size(q, launch.tile)
        for one, heads, kv_heads in self.heads(q, k, launch.tile, size):
            keys, key_sums = (
                (k[one, kv_heads], v[one, kv_heads]),
                (dk[one, kv_heads], dv[one, kv_heads]),
            )
            head_scores = scores.heads(heads)
            for rows, chunks in self.chunks(launch.tile, size):
                queries, dout_rows, out_rows = (
                    _as_rows(x[one, heads, rows], kv_heads, dtype)
                    for x in (q, dout, out)
                )
                mine = Queries(
                    queries * _factor(scores),
                    dout_rows,
                    _as_rows(lse[one, heads, rows, None], kv_heads, dtype) * _LOG2E,
                    (dout_rows * out_rows).sum(-1, keepdim=True),
                )
                into = dq[one, heads, rows]
                into += _gradient(
                    mine, *keys, *key_sums, launch.tile, rows, chunks, head_scores
                ).view(into.shape)

    def heads(
        self, q: Tensor, k: Tensor, tile: Tile, size: ChunkSize
    ) -> Iterator[tuple[int, slice, slice]]:
        """Yield a sequence's number, query heads and key/value heads to compute at once.

        Query heads that share keys are rows of one product. A group has key/value heads up to the number
        that keeps the scores of a chunk in a core's cache.
        """
        batch, kv_heads = k.shape[:2]
        shared = q.shape[1] // kv_heads
        scores = shared * min(tile.num_rows, size.rows) * min(tile.num_keys, size.keys)
        groups = _equal(0, kv_heads, max(1, size.scores // scores))
        for one in range(batch):
            for group in groups:
                yield one, slice(group.start * shared, group.stop * shared), group

    def chunks(
        self, tile: Tile, size: ChunkSize
    ) -> Iterator[tuple[slice, list[slice]]]:
        for rows in _equal(0, tile.num_rows, size.rows, _UNIT):
            # Keys outside of the band for all of these rows are never read.
            first, last = (
                max(0, rows.start - tile.hi),
                min(tile.num_keys, rows.stop - tile.lo),
            )
            yield rows, _equal(first, last, size.keys, _UNIT)


class Queries(NamedTuple):
    """A chunk of queries in backward. ``lse`` is the GLOBAL one times log2(e), ``delta = sum(dout out)``."""

    q: Tensor  # (g, P n, D), times ``_factor``
    dout: Tensor  # (g, P n, E)
    lse: Tensor  # (g, P n, 1)
    delta: Tensor


def _partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tile: Tile,
    rows: slice,
    chunks: list[slice],
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """Return out (g, P n, E) and lse (g, P n, 1) of a chunk of queries against chunks of keys."""
    top = total = sum_ = q.new_empty(0)
    for keys in chunks:
        s, _ = _scores(
            q, k[:, keys].to(q.dtype), tile, rows, keys, scores, differentiate=False
        )
        values = v[:, keys].to(q.dtype)
        # Online softmax over chunks of keys, in powers of two: earlier sums are scaled to the new maximum.
        highest = s.amax(-1, keepdim=True).clamp_(min=_LOWEST)
        if keys is chunks[0]:
            p = _weights(s, highest, tile, rows, keys, scores)
            sum_, total = p.sum(-1, keepdim=True), torch.bmm(p, values)
        else:
            highest = torch.maximum(top, highest)
            kept = (top - highest).exp2_()
            p = _weights(s, highest, tile, rows, keys, scores)
            sum_.mul_(kept).add_(p.sum(-1, keepdim=True))
            total.mul_(kept).baddbmm_(p, values)
        top = highest
        del s, p, values  # before the next ones are made
    return total.div_(sum_), top.add_(sum_.log2()).div_(_LOG2E)


def _gradient(
    mine: Queries, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, tile: Tile, rows: slice, chunks: list[slice],
    scores: Scores,
) -> Tensor:  # fmt: skip
    """Return dq (g, P n, D) of a chunk of queries, and add to dk and dv (g, m, D or E) in place, in chunks of keys.

        p = exp(s - lse),   dv = p^T dout,   ds = p (dout v^T - delta),   dq = scale ds k,   dk = scale ds^T q

    ``ds`` has the derivative of the softcap as a further factor.
    """
    dq = torch.zeros_like(mine.q)
    for keys in chunks:
        k_keys, v_keys = (x[:, keys].to(dq.dtype) for x in (k, v))
        s, slope = _scores(mine.q, k_keys, tile, rows, keys, scores, differentiate=True)
        p = _weights(s, mine.lse, tile, rows, keys, scores)
        dv[:, keys].baddbmm_(p.mT, mine.dout)
        # p comes from the global lse and needs no maximum; ds is the gradient of the scaled, capped scores.
        ds = p.mul_(torch.bmm(mine.dout, v_keys.mT).sub_(mine.delta))
        if slope is not None:
            ds *= slope
        dq.baddbmm_(ds, k_keys, alpha=scores.scale)
        # The queries have _factor: its product with alpha is the scale.
        dk[:, keys].baddbmm_(ds.mT, mine.q, alpha=scores.softcap or 1 / _LOG2E)
        del s, p, ds, slope, k_keys, v_keys  # before the next ones are made
    return dq


def _chunk_size(q: Tensor, tile: Tile) -> ChunkSize:
    """Return the chunk size: a megabyte of scores for a core's cache, or all heads."""
    if size := rules_of(q.device).chunk_size:
        return size
    is_short = tile.num_pairs <= SHORT * tile.num_rows
    rows = 64 if is_short and q.shape[1] >= 8 else 128 if q.shape[1] > 1 else 256
    return ChunkSize(rows, 512, 1 << 18)


def _equal(first: int, last: int, most: int, unit: int = 1) -> list[slice]:
    """Split [first, last) into the fewest equal parts of at most ``most``, if possible in ``unit``."""
    # All parts but the last end at a multiple of the unit, counted from ``first``.
    size, unit = last - first, gcd(unit, most)
    number = -(-size // most)
    edges = [
        first + min(size, -(-size * n // (number * unit)) * unit)
        for n in range(number + 1)
    ]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _as_rows(x: Tensor, kv_heads: slice, dtype: torch.dtype) -> Tensor:
    """Reshape (g, P, n, size) to (g, P n, size), rows for a shared head; a view if possible."""
    return x.to(dtype).reshape(kv_heads.stop - kv_heads.start, -1, x.shape[-1])


def _factor(scores: Scores) -> float:
    return scores.scale / scores.softcap if scores.softcap else scores.scale * _LOG2E


def _scores(
    q: Tensor,
    k: Tensor,
    tile: Tile,
    rows: slice,
    keys: slice,
    scores: Scores,
    differentiate: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return scores (g, P n, m) times log2(e), -inf outside the band, and their derivative if asked."""
    s, slope = torch.bmm(q, k.mT), None
    if scores.softcap:
        s.tanh_()
        # The derivative of tanh, from its value.
        slope = 1 - s.square() if differentiate else None
        s.mul_(scores.softcap * _LOG2E)
    if scores.slopes is not None:
        assert (
            scores.query_positions is not None and scores.key_positions is not None
        ), "slopes need positions"
        distance = (
            scores.query_positions[rows, None] - scores.key_positions[keys]
        ).abs_()
        slopes = scores.slopes.to(s.dtype).view(len(k), -1, 1, 1)
        _of_heads(s, rows).addcmul_(distance.to(s.dtype), slopes, value=-_LOG2E)
    _forbid(s, tile, rows, keys)
    return s, slope


def _weights(
    s: Tensor, base: Tensor, tile: Tile, rows: slice, keys: slice, scores: Scores
) -> Tensor:
    """Compute ``exp2(s - base)`` in place, without ALiBi's denormals, which slow down products."""
    s.sub_(base)
    if scores.slopes is not None:
        s.clamp_(min=_FAINTEST)
        _forbid(s, tile, rows, keys)
    return s.exp2_()


def _of_heads(s: Tensor, rows: slice) -> Tensor:
    return s.unflatten(1, (-1, rows.stop - rows.start))


def _forbid(s: Tensor, tile: Tile, rows: slice, keys: slice) -> None:
    """Add -inf to scores outside the band, in the columns that it cuts."""
    # Row i and column j of the chunk differ by i - j + corner in the tile. Only columns that the band cuts are touched.
    s, corner = _of_heads(s, rows), rows.start - keys.start
    # ``late`` is the first column that is too late for some row.
    late = max(0, corner - tile.lo + 1)
    if late < s.shape[-1]:
        cut = s[..., late:]
        cut += s.new_full(cut.shape[-2:], -torch.inf).triu_(corner - tile.lo + 1 - late)
    # Columns before ``early`` are too early for some row.
    early = min(s.shape[-1], corner + s.shape[-2] - 1 - tile.hi)
    if early > 0:
        cut = s[..., :early]
        cut += s.new_full(cut.shape[-2:], -torch.inf).tril_(corner - tile.hi - 1)

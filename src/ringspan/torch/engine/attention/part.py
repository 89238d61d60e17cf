"""One rank's part in the passes of an attention: its messages and launches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ringspan.core.schedule.gather import Gathered
from ringspan.core.schedule.kernel_launches import KernelLaunch
from ringspan.core.schedule.schedule import Schedule
from ringspan.core.schedule.workspace import head_groups
from ringspan.torch.engine.attention.block import (
    Block,
    GradientBlock,
    PackedSpec,
    PartialBlock,
    Sums,
)
from ringspan.torch.engine.attention.calls import Calls
from ringspan.torch.engine.attention.spec import AttentionSpec
from ringspan.torch.engine.kernels.contract import BackwardInputs, Scores, is_in_rows
from ringspan.torch.engine.kernels.cuts import rows_of
from ringspan.torch.engine.kernels.device import rules_of
from ringspan.torch.engine.transport.exchange import PendingReceive, Transfer
from ringspan.torch.engine.transport.protocol import Transport


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of partial and gradient sums: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def result_for(q: Tensor, v: Tensor) -> Tensor:
    """Allocate attention's result (B, H, T, E), stored as (B, T, H, E): joining a token's heads then copies nothing."""
    batch, heads, tokens, _ = q.shape
    return q.new_empty(batch, tokens, heads, v.shape[-1]).transpose(1, 2)


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a gradient like ``x``: in rows, which in-place kernels need, and in x's dimension order if possible."""
    return (
        torch.empty_like(x, dtype=dtype)
        if is_in_rows(x)
        else x.new_empty(x.shape, dtype=dtype)
    )


@dataclass(frozen=True)
class Ring:
    """One rank's part in an attention, of spec ``spec``; ``positions`` are each rank's of queries and of keys.

    ``gathered`` are the keys of a gathered pass, as its kernel reads them.
    """

    schedule: Schedule
    exchange: Transport
    scores: Scores
    spec: AttentionSpec
    head_groups: int = 1
    positions: tuple[Callable[[int], Tensor], Callable[[int], Tensor]] | None = None
    gathered: Gathered | None = None

    def heads(self, q: Tensor, k: Tensor) -> Sequence[tuple[int, slice, slice]]:
        """Return each group's number, query heads and key/value heads; queries stay with their key/value head."""
        return _head_slices(self.head_groups, q.shape[1], k.shape[1])

    def scores_of(self, launch: KernelLaunch, owner: int, heads: slice) -> Scores:
        if self.positions is None:
            return self.scores
        queries, keys = self.positions
        here = self.schedule.rank
        of_queries, of_keys = (
            (owner, here) if self.schedule.passes_queries else (here, owner)
        )
        of_key = keys(of_keys) if self.gathered is None else self._gathered_positions
        return replace(
            self.scores.heads(heads),
            query_positions=queries(of_queries)[launch.q0 : launch.q1],
            key_positions=of_key[launch.k0 : launch.k1],
        )

    @cached_property
    def _gathered_positions(self) -> Tensor:
        assert self.positions is not None and self.gathered is not None
        _, keys = self.positions
        pieces = self.gathered.pieces
        return torch.cat(
            [
                keys(self.schedule.rank)[:0],
                *(keys(piece.owner)[piece.start : piece.stop] for piece in pieces),
            ]
        )

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return (
            torch.bfloat16
            if self.spec.sent.rounds_gradients
            else accumulation_dtype(dtype)
        )


@lru_cache(maxsize=64)
def _head_slices(
    groups: int, heads: int, kv_heads: int
) -> tuple[tuple[int, slice, slice], ...]:
    def part(count: int, number: int) -> slice:
        return slice(count * number // groups, count * (number + 1) // groups)

    return tuple(
        (number, part(heads, number), part(kv_heads, number))
        for number in range(groups)
    )


def num_head_groups(q: Tensor, k: Tensor, schedule: Schedule, blocks: int = 2) -> int:
    on_cpu = rules_of(q.device).cuts_for_cores
    return head_groups(
        q.shape[0] * q.shape[1],
        k.shape[1],
        schedule.ranks,
        schedule.tile_pairs,
        on_cpu=on_cpu,
        blocks=blocks,
        rank_pairs=schedule.rank_pairs,
        key_bytes=k.nbytes,
        at_once=torch.get_num_threads() if on_cpu else 1,
    )


class Coming(NamedTuple):
    spec: PackedSpec
    transfer: Transfer
    receive: PendingReceive | None

    def wait(self) -> Block | None:
        self.transfer.wait()
        return None if self.receive is None else self.spec.on(self.receive.read())


def post(
    ring: Ring,
    sends: Sequence[tuple[int, Block]],
    receives: Sequence[tuple[int, PackedSpec]],
    message: int,
) -> list[Coming]:
    """Start sending packed blocks and receiving others, except empty ones."""
    transfer, pending = ring.exchange.post(
        [(peer, block.buffer) for peer, block in sends if block.buffer is not None],
        [(peer, spec.buffer_spec) for peer, spec in receives if spec.ranges],
        message,
    )
    arrived = iter(pending)
    return [
        Coming(spec, transfer, next(arrived) if spec.ranges else None)
        for _, spec in receives
    ]


def run_forward(
    ring: Ring, calls: Calls, owner: int, heads: slice, queries: Tensor, keys: tuple[Tensor, Tensor],
    total: PartialBlock,
) -> None:  # fmt: skip
    """Run a hop's launches for some heads, and merge their out and lse into ``total``."""
    kernel, launches = calls
    for launch, rows, columns, sums in launches:
        here, there = (
            rows_of(queries, rows),
            (rows_of(keys[0], columns), rows_of(keys[1], columns)),
        )
        scores = ring.scores_of(launch, owner, heads)
        if kernel.adds_in_place is True:
            kernel.forward_into(here, *there, launch, scores, *total.running(sums))
        else:
            total.add(sums, *kernel.forward(here, *there, launch, scores))
        del here, there


def run_backward(
    ring: Ring, calls: Calls, owner: int, heads: slice, queries: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: tuple[Tensor, Tensor], dq: Sums, total: GradientBlock,
) -> None:  # fmt: skip
    """Add the gradients of launches to dq and to dk and dv; ``queries`` are dout, q, out and lse."""
    kernel, launches = calls
    dout, q, out, lse = queries
    for launch, rows, columns, sums in launches:
        there = rows_of(keys[0], columns), rows_of(keys[1], columns)
        ours = BackwardInputs(
            rows_of(dout, rows),
            rows_of(q, rows),
            *there,
            rows_of(out, rows),
            rows_of(lse, rows),
        )
        scores = ring.scores_of(launch, owner, heads)
        if kernel.adds_in_place is True:
            running = dq.running(rows), *total.running(sums)
            kernel.backward_into(ours, launch, scores, *running)
            del ours, there, running
            continue
        new_dq, new_dk, new_dv = kernel.backward(ours, launch, scores)
        dq.add(rows, new_dq)
        total.add(sums, new_dk, new_dv)
        del ours, there, new_dq, new_dk, new_dv  # before the next ones are made


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the local ``-sum(exp(sink - lse) sum(dout * out))``, of shape (H,)."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    # Rows without keys are padding, and their dout may be anything.
    delta = delta.masked_fill_((out == 0).all(-1), 0)
    # A row without keys or sink has lse -inf, and -inf minus -inf would be NaN.
    base = lse.masked_fill(lse == -torch.inf, 0)
    return (
        -((sinks.to(lse.dtype)[:, None] - base).exp_() * delta)
        .sum((0, 2))
        .to(sinks.dtype)
    )


def collect(coming: list[Coming], total: GradientBlock | PartialBlock) -> None:
    while coming:
        if (block := coming.pop(0).wait()) is not None:
            total.add_block(block)


def store(total: Tensor, gradient: Tensor) -> None:
    if total is not gradient:
        gradient.copy_(total)


def finish_keys(
    coming: list[Coming], local: GradientBlock, gradients: tuple[Tensor, Tensor]
) -> None:
    """Add other ranks' gradients of this rank's keys to the local sum, and fill dk and dv."""
    collect(coming, local)
    total = local.finish()
    store(total.k, gradients[0])
    store(total.v, gradients[1])

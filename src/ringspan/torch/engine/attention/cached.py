"""Attention of n new tokens to a key/value cache that is split over the ranks of a ring.

Many new tokens are split over the ranks, with the shares as key layout, and queries travel if they are fewer bytes
(Yang et al. 2024, "Context Parallelism for Scalable Million-Token Inference"). Few are on every rank: each attends to
its own share, and one collective merges the partials (flash decoding, over devices).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.layout import CustomLayout
from ringspan.core.geometry.mask import Mask
from ringspan.core.schedule.choice import cheaper_route
from ringspan.core.schedule.schedule import make_schedule
from ringspan.core.schedule.workspace import Shape
from ringspan.torch.engine.attention.part import (
    Ring,
    accumulation_dtype,
    num_head_groups,
)
from ringspan.torch.engine.attention.request import Request
from ringspan.torch.engine.attention.ring import forward
from ringspan.torch.engine.attention.spec import AttentionSpec
from ringspan.torch.engine.kernels.contract import Scores
from ringspan.torch.engine.transport.agreement import agree, one_at_a_time
from ringspan.torch.engine.transport.protocol import transport_of

_MERGED: Final = {"what": "attention to a cache that is split over the ring"}


@dataclass(frozen=True)
class Reach:
    """Keys of a cache that layers of one kind see: their owners, and a mask."""

    keys: CustomLayout
    masks: tuple[Mask, ...]
    """One per sequence; a single one if all are equal."""


@dataclass(frozen=True)
class Turn:
    """One rank's part in a forward pass over new tokens, for all layers."""

    group: dist.ProcessGroup | None
    rank: int
    new: CustomLayout
    """Owners of the new tokens' keys."""
    is_split: bool
    """True if each rank computes only the tokens that it keeps."""
    reaches: Mapping[Any, Reach]
    records_past: bool = False
    """True if any of the new tokens may be taken back."""
    _rings: dict[object, Ring] = field(default_factory=dict)

    @cached_property
    def queries(self) -> CustomLayout:
        if self.is_split:
            return self.new
        return CustomLayout.of([[(self.start, self.new.length - self.start)]])

    @property
    def positions(self) -> Tensor:
        return torch.from_numpy(
            self.queries.positions(self.rank if self.is_split else 0)
        )

    @cached_property
    def kept(self) -> Tensor:
        """Return the new tokens that this rank keeps, counted from the first new one."""
        return torch.from_numpy(self.new.positions(self.rank)) - self.start

    @cached_property
    def start(self) -> int:
        return min(span.start for held in self.new.parts for span in held)

    @contextmanager
    def active(self) -> Iterator[None]:
        token = _turn.set(self)
        try:
            yield
        finally:
            _turn.reset(token)

    def attend(self, asked: Request, kind: object) -> Tensor:
        """Attend from q (B, H, n, D) to all keys, given this rank's share; UnsupportedError for another kind."""
        if (reach := self.reaches.get(kind)) is None:
            known = ", ".join(map(str, self.reaches))
            raise UnsupportedError(
                f"a layer sees {kind}, and the config, by which the cache forgets, says {known}; set layer_types and "
                "sliding_window of the config to what the layers do"
            )
        if len(reach.masks) == 1:
            return self._attend(asked, kind, reach.masks[0])
        result = asked.q.new_empty((*asked.q.shape[:-1], asked.v.shape[-1]))
        for mask, rows in _alike(reach.masks).items():
            result[rows] = self._attend(asked.of_rows(rows), kind, mask)
        return result

    def partial(self, asked: Request, kind: object) -> tuple[Tensor, Tensor]:
        """Return out and lse (B, H, n) without sinks; over this rank's keys only, if it computes all tokens."""
        masks, parts = self.reaches[kind].masks, list[tuple[Tensor, Tensor]]()
        each = len(asked.q) // len(masks)
        for number, mask in enumerate(masks):
            rows = asked.of_rows(slice(number * each, (number + 1) * each))
            ring = self._ring_of(rows, kind, mask)
            with (
                one_at_a_time(self.group),
                torch.autocast(asked.q.device.type, enabled=False),
            ):
                parts.append(forward(ring, rows.q, rows.k, rows.v))
        out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
        return out, lse

    def _attend(self, asked: Request, kind: object, mask: Mask) -> Tensor:
        q, k, v, sinks = asked.q, asked.k, asked.v, asked.sinks
        ring = self._ring_of(asked, kind, mask)
        with one_at_a_time(self.group), torch.autocast(q.device.type, enabled=False):
            if self.is_split or self.new.ranks == 1:
                return forward(ring, q, k, v, sinks)[0]
            return merged(*forward(ring, q, k, v), sinks, self.group).to(q.dtype)

    def _ring_of(self, asked: Request, kind: object, mask: Mask) -> Ring:
        q, k = asked.q, asked.k
        key = (
            kind,
            mask,
            asked.scale,
            asked.softcap,
            asked.kernel,
            q.shape[:2],
            k.shape[1],
        )
        if key not in self._rings:
            self._rings[key] = self._ring(asked, self.reaches[kind].keys, mask)
        return self._rings[key]

    def _ring(self, asked: Request, keys: CustomLayout, mask: Mask) -> Ring:
        """Return the ring that attends to a cache under one mask.

        If the new tokens are split, all ranks take the route that sends fewer bytes. Otherwise it is a ring of one
        rank, over this rank's share of the keys, whose partial ``merged`` joins to the others.
        """
        q, k, v = asked.q, asked.k, asked.v
        scores = Scores(
            q.shape[-1] ** -0.5 if asked.scale is None else asked.scale,
            asked.softcap or 0.0,
        )
        spec = AttentionSpec(
            scale=scores.scale,
            softcap=scores.softcap,
            mask=mask.spec,
            kernel=asked.kernel,
        )
        if not self.is_split:
            name: Any = "custom"  # outside of the names that users may give
            mine = CustomLayout(name, keys.length, 1, parts=(keys.parts[self.rank],))
            return Ring(
                make_schedule(self.queries, mask, 0, mine),
                transport_of(None, ""),
                scores,
                spec,
            )
        agree(self.group, _MERGED)
        shape = Shape(
            len(q), q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], k.dtype.itemsize
        )
        route = cheaper_route(self.queries, keys, mask, shape)
        schedule = make_schedule(self.queries, mask, self.rank, keys, route)
        exchange = transport_of(
            self.group, f"{_MERGED} {self.start} {self.new.length} {route} {mask.spec}"
        )
        return Ring(schedule, exchange, scores, spec, num_head_groups(q, k, schedule))


_turn: ContextVar[Turn | None] = ContextVar("turn", default=None)


def current_turn() -> Turn | None:
    return _turn.get()


def merged(
    out: Tensor, lse: Tensor, sinks: Tensor | None, group: dist.ProcessGroup | None
) -> Tensor:
    """Merge each rank's out (B, H, n, E) and lse (B, H, n) into the attention to all shares.

    ``sum_r w_r out_r`` with ``w_r = exp(lse_r) / (sum_r exp(lse_r) + exp(sink))``, in rank order for equal bits.
    """
    dtype = accumulation_dtype(out.dtype)
    mine = torch.cat((out.to(dtype), lse.to(dtype).unsqueeze(-1)), -1)
    every = mine.new_empty((dist.get_world_size(group), *mine.shape))
    dist.all_gather(list(every.unbind()), mine.contiguous(), group=group)
    outs, lses = every[..., :-1], every[..., -1]
    top = lses.amax(0)
    if sinks is not None:
        top = torch.maximum(top, sinks.to(dtype)[:, None])
    top = top.masked_fill(top == -torch.inf, 0)  # nothing to see: padding
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    if sinks is not None:
        total = total + torch.exp(sinks.to(dtype)[:, None] - top)
    result = (outs * weights.unsqueeze(-1)).sum(0)
    return result / total.masked_fill(total == 0, 1).unsqueeze(-1)


def _alike(masks: tuple[Mask, ...]) -> dict[Mask, slice | Tensor]:
    rows: dict[Mask, list[int]] = {}
    for row, mask in enumerate(masks):
        rows.setdefault(mask, []).append(row)
    return {
        mask: slice(those[0], those[-1] + 1)
        if those[-1] - those[0] + 1 == len(those)
        else torch.tensor(those)
        for mask, those in rows.items()
    }

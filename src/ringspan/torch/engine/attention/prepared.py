"""Preparation of a pass, made once: all layers of a step ask for the same, in forward and again in backward."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.remembered import Remembered
from ringspan.core.schedule.route import Heads, Route, member_heads
from ringspan.core.schedule.schedule import Schedule, make_schedule
from ringspan.torch.engine.attention.part import Ring, num_head_groups
from ringspan.torch.engine.attention.spec import AttentionSpec
from ringspan.torch.engine.attention.ulysses import Ulysses
from ringspan.torch.engine.kernels.contract import Scores
from ringspan.torch.engine.kernels.device import rules_of
from ringspan.torch.engine.transport.protocol import Transport

_MOST: Final = 256
"""Preparations kept: of the rows of a batch, each with its own documents, times kinds of layers and two passes."""


class Trade(NamedTuple):
    """A member's place in its Ulysses group, and the ranks that it talks to."""

    member: int
    shares: tuple[Heads, ...]
    group: tuple[int, ...]
    """Ranks that trade tokens for heads with this one."""
    across: tuple[int, ...]
    """Ranks of the ring between groups, one of each."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """Needs of a rank's pass besides its tensors and messages."""

    facts: dict[str, Any]
    """Arguments that must be equal on all ranks; not to be changed."""
    signature: str
    """Text that tells this pass's messages from others."""
    spec: AttentionSpec
    layouts: tuple[Layout, Layout]
    """Layouts of queries and keys, over groups if there is a trade."""
    schedule: Schedule
    head_groups: int
    trade: Trade | None = None

    def over(
        self, exchange: Transport, slopes: Tensor | None, device: torch.device
    ) -> tuple[Ring, Ulysses | None]:
        """Return the rank's ring, and its trade within a group if the route has one, over a transport."""
        ulysses, trade = None, self.trade
        if trade is not None:
            ulysses = Ulysses(
                trade.member,
                trade.shares,
                *self.layouts,
                exchange.among(trade.group, "trade"),
            )
            exchange = exchange.among(trade.across, "ring")
            slopes = None if slopes is None else slopes[ulysses.mine.queries]
        positions = None
        if slopes is not None:
            queries, keys = self.layouts
            positions = (
                partial(_positions, queries, device=device),
                partial(_positions, keys, device=device),
            )
        ring = Ring(
            self.schedule,
            exchange,
            Scores(self.spec.scale, self.spec.softcap, slopes),
            self.spec,
            self.head_groups,
            positions,
        )
        return ring, ulysses


_known: Final[Remembered[Hashable, Prepared]] = Remembered(_MOST)


def prepared(
    what: str, place: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, has_slopes: bool,
    has_sinks: bool,
) -> Prepared:  # fmt: skip
    """Return the preparation of a pass of this name for tensors like these, on rank ``place[0]`` of ``place[1]``."""
    rules = rules_of(q.device)
    # Heads are grouped by the number of threads, so it must be the same on every rank.
    threads = torch.get_num_threads() if rules.cuts_for_cores else 0
    key = (
        what,
        spec.text,
        place,
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        k.dtype,
        q.device,
        rules,
        threads,
        has_slopes,
        has_sinks,
    )
    found = _known.get(key)
    if found is None:
        found = _prepare(what, place, q, k, v, spec, threads, has_slopes, has_sinks)
        _known[key] = found
    return found


def _prepare(
    what: str, place: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, threads: int,
    has_slopes: bool, has_sinks: bool,
) -> Prepared:  # fmt: skip
    """Return the facts, schedule and groups of heads of a pass."""
    rank, ranks = place
    layout, keys = spec.layouts(q.shape[2], k.shape[2], ranks)
    facts = {
        "layout": f"{layout.fingerprint} over {ranks} ranks",
        "queries": tuple(q.shape),
        "keys": tuple(k.shape),
        "values": tuple(v.shape),
        "length": f"{layout.length} tokens and {keys.length} keys",
        "dtype": str(q.dtype),
        "keys' layout": keys.fingerprint,
        "mask": spec.mask,
        "route": spec.route,
        "sent": f"{spec.sent_as.option}, gradients {spec.sent.gradients}",
        "scores": f"scale {spec.scale}, softcap {spec.softcap}",
        "slopes": has_slopes,
        "sinks": has_sinks,
        "kernel": spec.kernel,
        "threads": threads,
    }
    route = Route.parse(spec.route, ranks)
    if what == "backward":
        route = route.backward
    trade = None
    if route.ulysses > 1:
        layout, keys = layout.grouped(route.ulysses), keys.grouped(route.ulysses)
        groups = [layout.group_ranks(number) for number in range(layout.ranks)]
        number = next(
            number for number, members in enumerate(groups) if rank in members
        )
        member = groups[number].index(rank)
        shares = member_heads(q.shape[1], k.shape[1], route.ulysses)
        across = tuple(members[member] for members in groups)
        trade = Trade(member, shares, groups[number], across)
        rank, mine = number, shares[member]
        q, k = q[:, mine.queries], k[:, mine.keys]
    schedule = _schedule(layout, keys, spec.mask, rank, replace(route, ulysses=1))
    head_groups = num_head_groups(q, k, schedule, schedule.blocks)
    signature = f"{what} {facts}"
    return Prepared(
        facts, signature, spec, (layout, keys), schedule, head_groups, trade
    )


@lru_cache(maxsize=64)
def _schedule(
    layout: Layout, keys: Layout, mask: str, rank: int, route: Route
) -> Schedule:
    return make_schedule(layout, Mask.parse(mask), rank, keys, route)


@lru_cache(maxsize=64)
def _positions(layout: Layout, rank: int, *, device: torch.device) -> Tensor:
    return torch.from_numpy(layout.positions(rank)).to(device)

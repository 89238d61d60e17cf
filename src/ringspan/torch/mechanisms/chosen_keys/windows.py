"""Tokens of other ranks by position, and windows of them that pool into one entry, at the place of its last token.

An entry belongs to the rank of its last token, and queries see it from there on. Windows begin with their document;
each may reach back over the one before. x are local tokens (B, T, C) of a row with its mask and layout.

Over a cache, queries are the new tokens. Entry w of a row that begins at o ends at the one position in
[w size, (w + 1) size) that is o - 1 modulo size, so rows with padding on their left have entries of the same numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.core.geometry.layout import CustomLayout, Layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.selection import (
    EVERYTHING,
    Held,
    Integers,
    Seen,
    seeing,
    seen_in,
    wanted,
)
from ringspan.torch.engine.attention.handler import handled
from ringspan.torch.engine.attention.part import accumulation_dtype, sink_gradient
from ringspan.torch.engine.transport.agreement import agree, one_at_a_time
from ringspan.torch.engine.transport.exchange import TensorSpec, Transfer
from ringspan.torch.engine.transport.protocol import Transport, transport_of
from ringspan.torch.mechanisms.chosen_keys.chosen import attend, attend_backward

Places = tuple[tuple[int, Tensor], ...]
"""Indices of tokens, by peer."""


class Fetch(NamedTuple):
    """Tokens that a rank fetches: their ``positions``, ascending.

    ``held`` are the local tokens that each peer wants, ``fetched`` the columns that a peer's tokens arrive in.
    """

    rank: int
    positions: Tensor
    held: Places
    fetched: Places

    def at(self, columns: Tensor) -> Tensor:
        return torch.cat((self.positions, self.positions.new_tensor([-1])))[
            columns.long()
        ].to(torch.int32)

    def columns(self, positions: Tensor) -> Tensor:
        return torch.searchsorted(
            self.positions, positions.long(), out_int32=True
        ).masked_fill_(positions < 0, -1)

    def start(self, x: Tensor, exchange: Transport, message: int = 0) -> "Moving":
        return _start(
            x,
            max(1, len(self.positions)),
            self.held,
            self.fetched,
            self.rank,
            exchange,
            message,
        )

    def start_back(
        self, gradient: Tensor, tokens: int, exchange: Transport, message: int = 1
    ) -> "Moving":
        return _start(
            gradient, tokens, self.fetched, self.held, self.rank, exchange, message
        )


class Moving(NamedTuple):
    """A transfer of tokens, and the tensor that sums what arrives."""

    total: Tensor
    taken: list[tuple[Tensor, Callable[[], Tensor]]]
    """Places of what each rank sends, the last rank's first, and what waits for it."""
    transfer: Transfer

    def finish(self) -> Tensor:
        self.transfer.wait()
        while self.taken:  # popped, so that a buffer is freed once it is added
            places, read = self.taken.pop()
            self.total.index_add_(1, places, read())
        return self.total


def _start(
    x: Tensor,
    size: int,
    sent: Places,
    taken: Places,
    rank: int,
    exchange: Transport,
    message: int,
) -> Moving:
    """Send the tokens of x (B, T, C) at the places in ``sent``, and start to receive the ones in ``taken``.

    The result (B, ``size``, C) is their sum by place: each place occurs once forward, and gradients of several readers
    add up on the way back.
    """
    sends: list[tuple[int, Tensor]] = []
    came: dict[int, Callable[[], Tensor]] = {}
    for peer, places in sent:
        if peer == rank:
            came[rank] = x.index_select(1, places).contiguous  # itself
            continue
        buffer = exchange.empty(_spec(x, places))
        sends.append((peer, torch.index_select(x, 1, places, out=buffer)))
    others = [(peer, _spec(x, places)) for peer, places in taken if peer != rank]
    transfer, pending = exchange.post(sends, others, message)
    came |= {
        peer: receive.read for (peer, _), receive in zip(others, pending, strict=True)
    }
    total = x.new_zeros(len(x), size, x.shape[-1])
    return Moving(
        total, [(places, came[peer]) for peer, places in reversed(taken)], transfer
    )


def _spec(x: Tensor, places: Tensor) -> TensorSpec:
    return TensorSpec((len(x), len(places), x.shape[-1]), x.dtype, x.device)


def at_columns(x: Tensor, columns: Tensor) -> Tensor:
    return torch.cat((x, x.new_zeros(len(x), 1, x.shape[-1])), 1)[:, columns]


class Windows(NamedTuple):
    """Windows of ``size`` tokens of a ``Row``, on one rank."""

    size: int
    inputs: Fetch
    columns: Tensor
    last: Tensor
    numbers: Tensor
    """Numbers of the entries made here, counted from the row's beginning."""
    entries: Fetch
    first: Tensor
    stop: Tensor
    most: int
    """Entries that a query here sees at most."""
    tails: Tensor
    """Each query's tokens after its last whole window, (T, size - 1), int32; -1 for none."""

    def tokens(self, chosen: Tensor) -> Tensor:
        """Return positions (B, T, k size + size - 1) of chosen entries' tokens, then of the tails, -1 for none."""
        back = torch.arange(1 - self.size, 1, dtype=torch.int32, device=chosen.device)
        tokens = (self.entries.at(chosen)[..., None] + back).masked_fill(
            chosen[..., None] < 0, -1
        )
        return torch.cat(
            (tokens.flatten(-2), self.tails.expand(len(chosen), -1, -1)), -1
        )


class Row(NamedTuple):
    """A sequence of documents as one rank of its layout sees it."""

    mask: str
    layout: Layout
    rank: int
    device: torch.device
    cached: CustomLayout | None = None
    """Keys of a cache, if queries see those, causally: but for padding, which has no key in the mask."""
    tail: range | None = None
    """Over a cache, positions before the new tokens whose inputs the first rank has in front of its own."""

    def seen_at(self, positions: Integers) -> Seen:
        """Return the keys of each position; none for padding."""
        return _seen_in(
            self.mask if self.cached is None else "causal", self.layout.length
        )(positions)

    @property
    def length(self) -> int:
        """Positions, padding included."""
        return max(self.layout.length, self.layout.padded_length)

    @property
    def most(self) -> int:
        """Keys that a token sees at most, on any rank."""
        return _most(self.mask if self.cached is None else "causal", self.layout)

    @property
    def local(self) -> Integers:
        return self.layout.positions(self.rank)

    @property
    def stored(self) -> Integers:
        """Positions of the inputs that this rank has, in their order."""
        return (
            np.concatenate((self.tail, self.local))
            if self.tail and not self.rank
            else self.local
        )

    def queries(self) -> list[Integers]:
        """Positions of each rank that see something."""
        return [each.positions for each in seeing(self.layout, self.seen_at)]

    def inputs(self, queries: list[Integers]) -> list[Integers]:
        """Return positions of each rank's inputs that something sees, given all ``queries``."""
        first, *others = queries
        before = np.array(self.tail or [], np.int64)
        return [
            np.concatenate((before[self.seen_at(before).counts > 0], first)),
            *others,
        ]

    def keys(self) -> tuple[Integers, list[Integers]]:
        """Return positions of this rank's keys, in their order, and of each rank's that something sees."""
        if self.cached is None:
            return self.local, self.queries()
        each = [self.cached.positions(rank) for rank in range(self.cached.ranks)]
        real = [
            [(start <= held) & (held < stop) for start, stop in self._real]
            for held in each
        ]
        return each[self.rank], [
            held[np.any(parts, 0)] for held, parts in zip(each, real, strict=True)
        ]

    @property
    def _real(self) -> list[tuple[int, int]]:
        """Runs [start, stop) of a cache's keys that are not padding."""
        regions, length = Mask.parse(self.mask).regions, self.layout.length
        return [(part.k0, max(part.k0, min(part.k1, length))) for part in regions]

    def real_before(self, positions: Integers) -> Integers:
        """Return how many keys of a cache come before each position."""
        counts = (
            np.clip(positions - start, 0, stop - start) for start, stop in self._real
        )
        return sum(counts, np.zeros_like(positions))

    def position_of(self, numbers: Tensor) -> Tensor:
        """Return positions of a cache's keys by their numbers; -1 for -1."""
        stop = 0
        positions = torch.full_like(numbers, -1)
        for start, end in self._real:
            positions = torch.where(numbers >= stop, numbers - stop + start, positions)
            stop += end - start
        return positions

    def bounds(self, fetch: Fetch) -> tuple[Tensor, Tensor]:
        """Return each local query's columns [first, stop) of the fetched tokens that it sees, int32 (T,)."""
        ends = (
            np.searchsorted(fetch.positions.cpu().numpy(), each)
            for each in self.seen_at(self.local)
        )
        first, stop = (
            torch.from_numpy(each.astype(np.int32)).to(self.device) for each in ends
        )
        return first, stop

    def columns(self, fetch: Fetch, last: Integers, reach: int) -> Tensor:
        """Return the columns (n, reach) of the ``reach`` tokens up to each of ``last``; -1 before its document."""
        wanted = last[:, None] + np.arange(1 - reach, 1)
        columns = np.searchsorted(fetch.positions.cpu().numpy(), wanted)
        seen = self.seen_at(last)
        columns[(wanted < seen.first[:, None]) | (seen.counts == 0)[:, None]] = -1
        return torch.from_numpy(columns).to(self.device)

    def entries(self, size: int) -> Fetch:
        """Return the last positions of all entries of a cached row, as a ``Fetch`` that sends nothing."""
        length = self.layout.length
        origin = int(self.seen_at(np.array([length - 1])).first[0])
        last = (
            torch.arange(-(-length // size), device=self.device) * size
            + (origin - 1) % size
        )
        return Fetch(self.rank, last, (), ())


@lru_cache(maxsize=64)
def _most(mask: str, layout: Layout) -> int:
    return int(_seen_in(mask, layout.length)(np.arange(layout.length)).counts.max())


@lru_cache(maxsize=64)
def _seen_in(mask: str, length: int) -> Callable[[Integers], Seen]:
    return seen_in(Mask.parse(mask), length)


@lru_cache(maxsize=64)
def windows_of(row: Row, size: int, reach: int) -> Windows:
    """Return the windows that end on this rank: what their entries pool, and which entries its queries see.

    A window ends at each token whose document has a multiple of ``size`` tokens up to it, and an entry pools the
    ``reach`` tokens up to there.
    """
    queries = row.queries()
    ends = [each[row.seen_at(each).counts % size == 0] for each in queries]
    mine, local = ends[row.rank], row.local
    inputs = _fetch(row, row.stored, row.inputs(queries), ends, reach)
    entries = (
        _fetch(row, mine, ends, queries) if row.tail is None else row.entries(size)
    )
    tails = (local[:, None] - np.arange(size - 1)).astype(np.int32)
    tails[np.arange(size - 1) >= (row.seen_at(local).counts % size)[:, None]] = -1
    order = np.argsort(local)
    last = order[np.searchsorted(local[order], mine)]
    last, numbers, tails = (
        torch.from_numpy(each).to(row.device) for each in (last, mine // size, tails)
    )
    columns, (first, stop) = row.columns(inputs, mine, reach), row.bounds(entries)
    return Windows(
        size,
        inputs,
        columns,
        last,
        numbers,
        entries,
        first,
        stop,
        int((stop - first).max()),
        tails,
    )


@lru_cache(maxsize=64)
def before(row: Row, reach: int) -> tuple[Fetch, Tensor]:
    """Return the fetch of the ``reach`` tokens up to each local one, and their columns (T, reach), or -1."""
    queries = row.queries()
    fetch = _fetch(row, row.stored, row.inputs(queries), queries, reach)
    return fetch, row.columns(fetch, row.local, reach)


@lru_cache(maxsize=64)
def visible(row: Row) -> tuple[Fetch, Tensor, Tensor]:
    """Return the fetch of all keys that local queries see, and the columns [first, stop) of each, int32 (T,)."""
    fetch = _fetch(row, *row.keys(), row.queries())
    return fetch, *row.bounds(fetch)


def _fetch(
    row: Row,
    stored: Integers,
    held: Sequence[Integers],
    readers: Sequence[Integers],
    reach: int = EVERYTHING,
) -> Fetch:
    """Return a rank's fetch of positions: those held by any rank and less than ``reach`` before one of its readers.

    ``stored`` are the positions of this rank's tensor, in its order.
    """
    mine, order = held[row.rank], np.argsort(stored)
    local = order[np.searchsorted(stored[order], mine)]
    owners, seers = (
        [Held(each, row.seen_at(each).first) for each in side]
        for side in (held, readers)
    )
    sent = {
        peer: local[wanted(owners[row.rank], each, reach)]
        for peer, each in enumerate(seers)
    }
    taken = {
        owner: each.positions[wanted(each, seers[row.rank], reach)]
        for owner, each in enumerate(owners)
    }
    positions = np.sort(np.concatenate([*taken.values()]))
    arriving = {
        owner: np.searchsorted(positions, each) for owner, each in taken.items()
    }

    def places(of: dict[int, Integers]) -> Places:
        return tuple(
            (peer, torch.from_numpy(each).to(row.device))
            for peer, each in of.items()
            if len(each)
        )

    return Fetch(
        row.rank,
        torch.from_numpy(positions).to(row.device),
        places(sent),
        places(arriving),
    )


def fetched(
    x: Tensor, fetch: Fetch, group: dist.ProcessGroup | None, *, is_wide: bool = False
) -> Tensor:
    """Return the tokens (B, n, C) that a rank fetches of x (B, T, C); differentiable and collective.

    ``is_wide`` returns it in the accumulation dtype: autograd rounds a gradient to the dtype of its tensor, which would
    happen before the gradients of all ranks are summed.
    """
    dtype = accumulation_dtype(x.dtype) if is_wide else x.dtype
    return _Fetched.apply(x, fetch, group, dtype)  # pyright: ignore[reportReturnType]


class _Fetched(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        fetch: Fetch,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.fetch, ctx.group, ctx.tokens, ctx.dtype = fetch, group, x.shape[1], x.dtype
        with passing_tokens(x, group) as exchange:
            return fetch.start(x.detach(), exchange).finish().to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        wide = gradients[0].to(accumulation_dtype(gradients[0].dtype))
        with passing_tokens(wide, ctx.group) as exchange:
            return (
                ctx.fetch.start_back(wide, ctx.tokens, exchange).finish().to(ctx.dtype),
                None,
                None,
                None,
            )


@contextmanager
def passing_tokens(x: Tensor, group: dist.ProcessGroup | None) -> Iterator[Transport]:
    facts = {"rows": len(x), "size": x.shape[-1], "dtype": str(x.dtype)}
    with one_at_a_time(group):
        agree(group, facts)
        yield transport_of(group, f"tokens {facts}")


class Attended(torch.autograd.Function):
    """Attention from q (B, H, T, D) to columns (B, T, k) of keys (B, n, D), which are values too.

    It computes in q's dtype, and the gradient of keys that are wider is not rounded to it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        keys: Tensor,
        columns: Tensor,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        keys, ctx.scale, ctx.values = keys.to(q.dtype), scale, slice(0, keys.shape[-1])
        out, lse = (
            x.detach()
            for x in handled(lambda: attend(q, keys, columns, ctx.values, scale, sinks))
        )
        ctx.save_for_backward(q, keys, columns, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dout,) = gradients
        q, keys, columns, sinks, out, lse = ctx.saved_tensors
        dq, dkeys = attend_backward(
            dout, q, keys, columns, ctx.values, ctx.scale, out, lse
        )
        dsinks = None if sinks is None else sink_gradient(dout, out, lse, sinks)
        return dq, dkeys, None, None, dsinks

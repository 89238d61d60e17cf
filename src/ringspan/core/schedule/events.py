"""Events of one rank in one pass over its schedule, in order: allocate, free, send, wait, compute, add.

The loop of ``ringspan.torch.attention.ring`` carries out exactly these: a test holds every message and every byte of
the two together. Times (``core/schedule/timing.py``) and memory (``plan/cost/loop.py``) are read off the same events.

Inputs and results of a pass are there before and after it, so no event makes them. H query heads, G key/value heads,
D head size, E value head size, n tokens.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeVar

from ringspan.core.geometry.ranges import Ranges, minus, size, union
from ringspan.core.schedule.kernel_launches import KernelLaunch, within_ranges
from ringspan.core.schedule.schedule import Hop, Schedule, Send
from ringspan.core.schedule.workspace import Kernel, Shape, merge_bytes, sent_itemsize

MESSAGES_PER_HOP: Final = 2  # keys and values before the computation, gradients after it
_FLOAT32: Final = 4
_BFLOAT16: Final = 2
_SCALED: Final = frozenset({"float8", "int8"})  # a byte a number, and a factor for the keys and the values of each head


@dataclass(frozen=True)
class Part:
    """One rank's part in a pass of one attention, as ``ringspan.torch.attention.ring.Ring`` has it.

    Args:
        schedule: what is computed and sent.
        shape: of all heads; ``head_groups`` of them go through the loop one after the other.
        tokens: of the rank's queries.
        key_tokens: of its keys.
        kernel: what a launch of one group of heads takes; nothing if None, as for one that adds in place.
        comm_dtype: how keys and values are sent: exact, bfloat16, float8 or int8.
        gradient_comm_dtype: how dk and dv are sent: exact (float32) or bfloat16.
        kv_itemsize: bytes of a number of the dk and dv that backward returns; ``shape``'s if None.
    """

    schedule: Schedule
    shape: Shape
    tokens: int = 0
    key_tokens: int = 0
    kernel: Kernel | None = None
    comm_dtype: str = "exact"
    gradient_comm_dtype: str = "exact"
    head_groups: int = 1
    kv_itemsize: int | None = None

    @property
    def group(self) -> Shape:
        shape = self.shape
        return replace(shape, heads=shape.heads // self.head_groups, kv_heads=shape.kv_heads // self.head_groups)


class Buffer:
    """Memory for some ranges of an owner's tokens, as long as it has a holder: a loop's variable, or a transfer.

    ``is_sum``: not a message, but the float32 sums of this rank's own results.
    """

    __slots__ = "holders", "is_sum", "num_bytes", "ranges"

    def __init__(self, num_bytes: int, ranges: Ranges = (), *, is_sum: bool = False) -> None:
        self.num_bytes, self.ranges, self.is_sum, self.holders = num_bytes, ranges, is_sum, 1


class Message(NamedTuple):
    """Message to, or from, a peer."""

    peer: int
    buffer: Buffer


class Make(NamedTuple):
    buffer: Buffer


class Free(NamedTuple):
    buffer: Buffer


class Post(NamedTuple):
    """Start a transfer's sends and receives; ``number`` is its messages' number."""

    number: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class Wait(NamedTuple):
    """Wait until all of a transfer has arrived and been sent."""

    number: int


class Compute(NamedTuple):
    """The tiles of a hop; ``num_bytes`` is what its largest launch takes while it runs."""

    hop: Hop
    num_bytes: int


class Accumulate(NamedTuple):
    """Add a received partial; merging temporarily takes ``num_bytes``."""

    num_bytes: int


class Convert(NamedTuple):
    """Convert into the communication dtype or out of it, which temporarily takes ``num_bytes``."""

    num_bytes: int


Event = Make | Free | Post | Wait | Compute | Accumulate | Convert
_T = TypeVar("_T")
Steps = Generator[Event, None, _T]


def forward(part: Part) -> Iterator[Event]:
    """Yield the events of a forward pass."""
    last: list[Buffer] = []  # sums, and what arrived last: variables until the next group has its own
    for number in range(part.head_groups):
        last = yield from _Walk(part, number).forward(last)
    yield from _drop(*last)


def backward(part: Part) -> Iterator[Event]:
    """Yield the events of a backward pass; with queries as blocks it sends keys and values (``Route.backward``).

    The gradients of a group of heads still reach their owner at the first hop of the next one.
    """
    unfinished: list[_Walk] = []
    for number in range(part.head_groups):
        walk = _Walk(part, number)
        yield from walk.backward(unfinished)
        unfinished.append(walk)
    yield from unfinished.pop().finish()


@dataclass
class _Transfer:
    number: int
    sends: list[Buffer]
    is_over: bool


class _Coming(NamedTuple):
    transfer: _Transfer
    arrival: Buffer | None  # None where nothing comes


class _Sum:
    """Rows of partials that add up: which of them have one already."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self._rows: Ranges = ()

    def touch(self, start: int, stop: int) -> bool:
        """Mark rows as touched; return True if no row had a partial."""
        missing = size(minus(((start, stop),), self._rows))
        self._rows = union(self._rows, ((start, stop),))
        return missing == stop - start


class _Walk:
    """One group of heads on its way through the hops; holders are dropped when the loop drops its variables."""

    def __init__(self, part: Part, number: int) -> None:
        self.part, self.shape, self.hops = part, part.group, part.schedule.hops
        self.first_message = MESSAGES_PER_HOP * number * len(self.hops)
        shape, queries = self.shape, part.schedule.passes_queries
        self.own = Buffer(0, ((0, part.tokens if queries else part.key_tokens),))  # lies in the inputs
        self.numbers = shape.query_numbers if queries else shape.kv_numbers
        self.is_scaled = part.comm_dtype in _SCALED
        self.is_converted = self.is_scaled or (part.comm_dtype == "bfloat16" and shape.itemsize != _BFLOAT16)
        self.factors = 2 * _FLOAT32 * shape.batch * shape.kv_heads if self.is_scaled else 0
        self.sent_token = self.numbers * sent_itemsize(part.comm_dtype, shape.itemsize)
        self.under_way: dict[int, _Coming] = {}  # blocks, by their hop
        self.returning: list[_Coming] = []  # what other ranks made of this rank's own block
        self.sums = Buffer(0)  # of dk and dv

    def forward(self, last: list[Buffer]) -> Steps[list[Buffer]]:
        """Run forward; ``last`` are the previous group's sums and last arrival; return this group's."""
        shape, part = self.shape, self.part
        row = shape.batch * shape.heads * shape.sum_itemsize
        partial = row * (shape.value_dim + 1)
        in_results = shape.itemsize == shape.sum_itemsize
        local = _Sum((yield from _make(0 if in_results else row * shape.value_dim * part.tokens, is_sum=True)))
        arrived = last[1:]
        yield from _drop(*last[:1])
        for hop in self.part.schedule.active:
            block = yield from self._arrive(hop)
            total, is_sent = local, part.schedule.passes_queries and hop.index > 0
            if is_sent:
                total = _Sum((yield from _make(partial * size(hop.gradient_to_owner), hop.gradient_to_owner)))
            yield Compute(hop, self._forward_bytes(hop, block, total))
            if is_sent and (hop.gradient_to_owner or hop.from_visitor.ranges):
                sends = [(hop.owner, total.buffer)]
                coming = yield from self._post(MESSAGES_PER_HOP * hop.index + 1, sends, [(hop.from_visitor, partial)])
                yield from _drop(*arrived)
                arrived = _held(coming)
                yield from self._collect(local)  # of the hop before: no more than two wait
                self.returning += coming
            yield from _drop(*([total.buffer] if is_sent else []), block)
        yield from self._collect(local)
        return [local.buffer, *arrived]

    def backward(self, unfinished: list["_Walk"]) -> Steps[None]:
        """``unfinished`` is the group before, whose ``finish`` comes when the first hop has been computed."""
        shape, part = self.shape, self.part
        token = shape.kv_numbers * shape.sum_itemsize
        sent_token = shape.kv_numbers * _BFLOAT16 if part.gradient_comm_dtype == "bfloat16" else token
        queries = 0 if shape.itemsize == shape.sum_itemsize else shape.query_numbers * shape.sum_itemsize
        keys = 0 if (part.kv_itemsize or shape.itemsize) == shape.sum_itemsize else token
        of_queries = yield from _make(queries * part.tokens, is_sum=True)
        self.sums = yield from _make(keys * part.key_tokens, is_sum=True)
        behind: dict[int, _Coming] = {}  # by hop, the sum over the earlier ranks of its block
        arrived: list[Buffer] = []
        block = self.own
        for hop in self.part.schedule.active:
            before, block = block, (yield from self._arrive(hop))
            yield from _drop(before)
            total = self.own
            if hop.index:
                total = yield from _make(token * size(hop.gradient), hop.gradient)
            yield Compute(hop, self._backward_bytes(hop, block, total))
            if hop.index in behind:
                yield from self._add(behind.pop(hop.index))
            sends: list[tuple[int, Buffer]] = []
            for peer, ranges in (hop.gradient_on, Send(hop.owner, hop.gradient_to_owner)):
                if ranges:
                    packed = yield from _pack(total, ranges, token)
                    sends.append((peer, packed))
                    if sent_token != token:
                        sends[-1] = peer, (yield from _make(sent_token * size(ranges), ranges))
                        yield from _drop(packed)
            next_in = self.hops[hop.gradient_next].gradient_in
            if sends or next_in.ranges or hop.from_visitor.ranges:
                receives = [(next_in, sent_token), (hop.from_visitor, sent_token)]
                coming, from_visitor = yield from self._post(MESSAGES_PER_HOP * hop.index + 1, sends, receives)
                yield from _drop(*arrived)
                arrived = _held([coming])
                if hop.gradient_next:
                    behind[hop.gradient_next] = coming
                if hop.from_visitor.ranges:
                    yield from self._collect()  # of the hops before: no more than two wait
                self.returning.append(from_visitor)
            yield from _drop(total, *(buffer for _, buffer in sends))
            if unfinished and hop.index == 0:
                yield from unfinished.pop().finish()
        yield from _drop(block, *arrived, of_queries)

    def finish(self) -> Iterator[Event]:
        yield from self._collect()
        yield from _drop(self.sums)

    def _arrive(self, hop: Hop) -> Steps[Buffer]:
        """Return the block that a hop computes with; post the following ones."""
        coming = self.under_way.pop(hop.index, None)
        arrival = (yield from self._wait(coming)) if coming else None
        if hop.index:
            coded = arrival or Buffer(0)
            block = (yield from self._decode(arrival)) if arrival else Buffer(0)
        else:
            block, coded = self.own, self.own
            if self.is_converted and any(send.ranges for _, send in hop.sends):
                coded = yield from self._encode()
        is_straight = any(send.ranges for send in hop.straight)
        mine = (yield from self._encode()) if is_straight and self.is_converted else self.own
        packed: dict[Ranges, Buffer] = {}
        for (index, (peer, ranges)), straight in zip(hop.sends, hop.straight, strict=True):
            arriving = self.hops[index].arrives
            if not (ranges or straight.ranges or arriving.ranges):
                continue
            if ranges and ranges not in packed:
                packed[ranges] = yield from self._pack(coded, ranges)
            sends = [(peer, packed[ranges])] if ranges else []
            own = [(straight.peer, (yield from self._pack(mine, straight.ranges)))] if straight.ranges else []
            sends, receives = [*sends, *own], [(arriving, self.sent_token)]
            (self.under_way[index],) = yield from self._post(MESSAGES_PER_HOP * index, sends, receives, self.factors)
            yield from _drop(*(buffer for _, buffer in own))
        yield from _drop(coded, mine, *packed.values())
        return block

    def _pack(self, whole: Buffer, ranges: Ranges) -> Steps[Buffer]:
        return _pack(whole, ranges, self.sent_token, self.factors, can_hand_on=whole is not self.own)

    def _encode(self) -> Steps[Buffer]:
        coded = yield from _make(self.sent_token * size(self.own.ranges) + self.factors, self.own.ranges)
        if self.is_scaled:  # a float32 copy of keys or of values, their absolute values and the largest of these
            number, copies = max(self._parts(size(self.own.ranges))), 2 if self.shape.itemsize != _FLOAT32 else 1
            yield Convert(_FLOAT32 * (copies * number + self.shape.batch * self.shape.kv_heads) if number else 0)
        return coded

    def _decode(self, coded: Buffer) -> Steps[Buffer]:
        """Decode a received block for computing: ``coded`` itself if it needs no conversion."""
        if not self.is_converted:
            coded.holders += 1
            return coded
        itemsize, number = self.shape.itemsize, size(coded.ranges)
        if self.is_scaled:  # keys, then values: float32, times their factor, in the dtype of the inputs
            keys, values = self._parts(number)
            copies = _FLOAT32 + (_FLOAT32 if itemsize == _FLOAT32 else max(_FLOAT32, itemsize))
            yield Convert(max(copies * keys, itemsize * keys + copies * values))
        return (yield from _make(itemsize * self.numbers * number, coded.ranges))

    def _parts(self, tokens: int) -> tuple[int, int]:
        heads = tokens * self.shape.batch * self.shape.kv_heads
        return heads * self.shape.head_dim, heads * self.shape.value_dim

    def _post(
        self, message: int, sends: list[tuple[int, Buffer]], receives: list[tuple[Send, int]], extra: int = 0
    ) -> Steps[list[_Coming]]:
        """Start a transfer; empty parts send no message. ``receives`` are tokens and the bytes of each."""
        arrivals: list[Buffer | None] = []
        for (_, ranges), token in receives:
            arrivals.append((yield from _make(token * size(ranges) + extra, ranges)) if ranges else None)
        sent = tuple(Message(peer, buffer) for peer, buffer in sends if buffer.ranges)
        received = tuple(Message(one.peer, x) for (one, _), x in zip(receives, arrivals, strict=True) if x)
        transfer = _Transfer(self.first_message + message, [message.buffer for message in sent], not sent + received)
        for buffer in transfer.sends:
            buffer.holders += 1
        if sent or received:
            yield Post(transfer.number, sent, received)
        return [_Coming(transfer, arrival) for arrival in arrivals]

    def _wait(self, coming: _Coming) -> Steps[Buffer | None]:
        """Return what has arrived, if anything comes."""
        transfer = coming.transfer
        if not transfer.is_over:
            yield Wait(transfer.number)
            yield from _drop(*transfer.sends)
            transfer.is_over = True
        return coming.arrival

    def _add(self, coming: _Coming, total: _Sum | None = None) -> Iterator[Event]:
        """Wait for another rank's partial result of a block, and add it."""
        arrival = yield from self._wait(coming)
        if arrival is None:
            return
        rows = ((stop - start, total and not total.touch(start, stop)) for start, stop in arrival.ranges)
        for count, is_merged in rows:
            yield Accumulate(merge_bytes(self.shape, count) if is_merged else 0)
        yield from _drop(arrival)

    def _collect(self, total: _Sum | None = None) -> Iterator[Event]:
        while self.returning:
            yield from self._add(self.returning.pop(0), total)

    def _launches(self, hop: Hop, *packed: Ranges) -> Iterator[KernelLaunch]:
        if self.part.kernel is None:
            return iter(())
        queries = self.part.schedule.passes_queries
        return within_ranges(self.part.kernel.launches, hop.bands, *packed, passes_queries=queries)

    def _forward_bytes(self, hop: Hop, block: Buffer, total: _Sum) -> int:
        kernel, launches = self.part.kernel, self._launches(hop, block.ranges)
        touched = ((launch, total.touch(launch.q0, launch.q1)) for launch in launches)
        return (
            max((kernel.forward_bytes(one, is_first=is_first) for one, is_first in touched), default=0) if kernel else 0
        )

    def _backward_bytes(self, hop: Hop, block: Buffer, total: Buffer) -> int:
        kernel, launches = self.part.kernel, self._launches(hop, block.ranges, total.ranges)
        return max((kernel.backward_bytes(launch) for launch in launches), default=0) if kernel else 0


def _make(num_bytes: int, ranges: Ranges = (), *, is_sum: bool = False) -> Steps[Buffer]:
    buffer = Buffer(num_bytes, ranges, is_sum=is_sum)
    if num_bytes:
        yield Make(buffer)
    return buffer


def _drop(*buffers: Buffer) -> Iterator[Free]:
    for buffer in buffers:
        buffer.holders -= 1
        if buffer.num_bytes and not buffer.holders:
            yield Free(buffer)


def _held(coming: list[_Coming]) -> list[Buffer]:
    arrivals = [each.arrival for each in coming if each.arrival]
    for arrival in arrivals:
        arrival.holders += 1
    return arrivals


def _pack(whole: Buffer, ranges: Ranges, token: int, factors: int = 0, *, can_hand_on: bool = True) -> Steps[Buffer]:
    if can_hand_on and ranges == whole.ranges:
        whole.holders += 1
        return whole
    return (yield from _make(token * size(ranges) + factors, ranges))

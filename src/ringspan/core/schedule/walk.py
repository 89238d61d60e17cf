"""One group of heads on its way through the hops of a pass: the events of ``core/schedule/events.py``."""

from collections.abc import Iterable, Iterator
from typing import Final

from ringspan.core.geometry.ranges import Ranges, size
from ringspan.core.schedule.gather import Stage
from ringspan.core.schedule.kernel_launches import KernelLaunch, within_ranges
from ringspan.core.schedule.schedule import Hop, Send
from ringspan.core.schedule.steps import (
    MESSAGES_PER_HOP,
    Accumulate,
    Buffer,
    Coming,
    Compute,
    Convert,
    Deferred,
    Event,
    Message,
    Part,
    Post,
    Steps,
    Sum,
    Transfer,
    Wait,
    drop,
    held,
    make,
    pack,
)

_FLOAT32: Final = 4
_BFLOAT16: Final = 2


class Walk:
    """One group of heads on its way through the hops; a dropped variable frees its buffer."""

    def __init__(self, part: Part, number: int) -> None:
        """Start at hop 0 with the rank's own block.

        ``numbers``: numbers per token of a block. ``is_converted``: blocks travel in another dtype than the inputs';
        ``is_scaled``: in one byte per number, with ``factors`` bytes of scales. ``sent_token``: bytes per token of a
        message.
        """
        self.part, self.shape, self.hops = part, part.group, part.schedule.hops
        self.first_message = MESSAGES_PER_HOP * number * len(self.hops)
        shape, queries = self.shape, part.schedule.passes_queries
        # The own block is part of the inputs, so it takes no bytes.
        self.own = Buffer(0, ((0, part.tokens if queries else part.key_tokens),))
        self.numbers = shape.query_numbers if queries else shape.kv_numbers
        sent = shape.sent_as
        self.is_scaled = sent.is_scaled
        self.is_converted = sent.converts(shape.itemsize)
        self.factors = (
            2 * _FLOAT32 * shape.batch * shape.kv_heads if self.is_scaled else 0
        )
        self.sent_token = self.numbers * sent.sent_itemsize(shape.itemsize)
        self.under_way: dict[int, Coming] = {}  # blocks, by their hop
        # Other ranks' results for this rank's own block: partials of queries, or dk and dv.
        self.returning: list[Coming] = []
        self.sums = Buffer(0)  # dk and dv of the own block

    def forward(self, last: list[Buffer]) -> Steps[list[Buffer]]:
        """Run forward after the previous group; return this group's sums and last arrival."""
        shape, part = self.shape, self.part
        partial = shape.batch * shape.heads * shape.sum_itemsize * (shape.value_dim + 1)
        local = self.total()
        arrived = last[1:]
        yield from drop(*last[:1])
        for hop in self.part.schedule.active:
            block = yield from self._arrive(hop)
            total, is_sent = local, part.schedule.passes_queries and hop.index > 0
            if is_sent:
                total = Sum(
                    shape,
                    (
                        yield from make(
                            partial * size(hop.gradient_to_owner), hop.gradient_to_owner
                        )
                    ),
                )
            yield from self._compute(hop, block, total)
            if is_sent and (hop.gradient_to_owner or hop.from_visitor.ranges):
                sends = [(hop.owner, total.buffer)]
                coming = yield from self.post(
                    MESSAGES_PER_HOP * hop.index + 1,
                    sends,
                    [(hop.from_visitor, partial)],
                )
                yield from drop(*arrived)
                arrived = held(coming)
                # Add up the hop before's, so that at most two wait.
                yield from self._collect(local)
                self.returning += coming
            yield from drop(*([total.buffer] if is_sent else []), block)
        yield from self._collect(local)
        yield from local.finish()
        return [local.buffer, *arrived]

    def backward(self, unfinished: list["Walk"]) -> Steps[None]:
        """Run backward; ``unfinished``, the group before, finishes after the first hop."""
        shape, part = self.shape, self.part
        token, sent_token = self.gradient_token
        queries = (
            0
            if shape.itemsize == shape.sum_itemsize
            else shape.query_numbers * shape.sum_itemsize
        )
        keys = (
            0 if (part.kv_itemsize or shape.itemsize) == shape.sum_itemsize else token
        )
        of_queries = yield from make(queries * part.tokens, is_sum=True)
        self.sums = yield from make(keys * part.key_tokens, is_sum=True)
        # The gradient of each hop's block, summed over earlier ranks.
        behind: dict[int, Coming] = {}
        arrived: list[Buffer] = []
        block = self.own
        for hop in self.part.schedule.active:
            before, block = block, (yield from self._arrive(hop))
            yield from drop(before)
            total = self.own
            if hop.index:
                total = yield from make(token * size(hop.gradient), hop.gradient)
            yield Compute(hop, self._backward_bytes(hop, block, total))
            if hop.index in behind:
                yield from self._add(behind.pop(hop.index))
            sends = yield from self._gradients_of(hop, total)
            next_in = self.hops[hop.gradient_next].gradient_in
            if sends or next_in.ranges or hop.from_visitor.ranges:
                receives = [(next_in, sent_token), (hop.from_visitor, sent_token)]
                coming, from_visitor = yield from self.post(
                    MESSAGES_PER_HOP * hop.index + 1, sends, receives
                )
                yield from drop(*arrived)
                arrived = held([coming])
                if hop.gradient_next:
                    behind[hop.gradient_next] = coming
                if hop.from_visitor.ranges:
                    # Add up earlier hops', so that at most two wait.
                    yield from self._collect()
                self.returning.append(from_visitor)
            yield from drop(total, *(buffer for _, buffer in sends))
            if unfinished and hop.index == 0:
                yield from unfinished.pop().finish()
        yield from drop(block, *arrived, of_queries)

    def _gradients_of(self, hop: Hop, total: Buffer) -> Steps[list[tuple[int, Buffer]]]:
        """Pack a block's gradient for its next rank and for its owner, in the dtype that is sent."""
        token, sent_token = self.gradient_token
        sends: list[tuple[int, Buffer]] = []
        for peer, ranges in (hop.gradient_on, Send(hop.owner, hop.gradient_to_owner)):
            if not ranges:
                continue
            packed = yield from pack(total, ranges, token)
            if sent_token == token:
                sends.append((peer, packed))
            else:
                coded = yield from make(sent_token * size(ranges), ranges)
                sends.append((peer, coded))
                yield from drop(packed)
        return sends

    @property
    def gradient_token(self) -> tuple[int, int]:
        """Bytes of a token's dk and dv, as summed and as sent."""
        token = self.shape.kv_numbers * self.shape.sum_itemsize
        return (
            token,
            self.shape.kv_numbers * _BFLOAT16
            if self.part.sent.rounds_gradients
            else token,
        )

    def total(self) -> Sum:
        if self.shape.itemsize == self.shape.sum_itemsize:
            return Sum(self.shape, Buffer(0, is_sum=True))
        return Deferred(self.shape, self.part.tokens)

    def finish(self) -> Iterator[Event]:
        yield from self._collect()
        yield from drop(self.sums)

    def _arrive(self, hop: Hop) -> Steps[Buffer]:
        """Return the block of a hop; post the following ones."""
        block, coded = yield from self._forms(hop)
        yield from self._send_on(hop, coded)
        return block

    def _forms(self, hop: Hop) -> Steps[tuple[Buffer, Buffer]]:
        """Return a hop's block as it is computed with, and as it is sent on."""
        coming = self.under_way.pop(hop.index, None)
        arrival = (yield from self.wait(coming)) if coming else None
        if hop.index:
            block = (yield from self.decode(arrival)) if arrival else Buffer(0)
            return block, arrival or Buffer(0)
        if self.is_converted and any(send.ranges for _, send in hop.sends):
            return self.own, (yield from self.encode())
        return self.own, self.own

    def _send_on(self, hop: Hop, coded: Buffer) -> Iterator[Event]:
        """Post the hops that follow a hop: parts of its block, and of the own one to ranks that it reaches straight."""
        is_straight = any(send.ranges for send in hop.straight)
        mine = (
            (yield from self.encode())
            if is_straight and self.is_converted
            else self.own
        )
        packed: dict[Ranges, Buffer] = {}
        for (index, (peer, ranges)), straight in zip(
            hop.sends, hop.straight, strict=True
        ):
            arriving = self.hops[index].arrives
            if not (ranges or straight.ranges or arriving.ranges):
                continue
            if ranges and ranges not in packed:
                packed[ranges] = yield from self.pack(coded, ranges)
            sends = [(peer, packed[ranges])] if ranges else []
            own = (
                [(straight.peer, (yield from self.pack(mine, straight.ranges)))]
                if straight.ranges
                else []
            )
            sends, receives = [*sends, *own], [(arriving, self.sent_token)]
            (self.under_way[index],) = yield from self.post(
                MESSAGES_PER_HOP * index, sends, receives, self.factors
            )
            yield from drop(*(buffer for _, buffer in own))
        yield from drop(coded, mine, *packed.values())

    def pack(self, whole: Buffer, ranges: Ranges) -> Steps[Buffer]:
        return pack(
            whole,
            ranges,
            self.sent_token,
            self.factors,
            can_hand_on=whole is not self.own,
        )

    def encode(self) -> Steps[Buffer]:
        coded = yield from make(
            self.sent_token * size(self.own.ranges) + self.factors, self.own.ranges
        )
        # Scaling takes a float32 copy of keys or of values, their absolute values and the largest of these.
        if self.is_scaled:
            number, copies = (
                max(self.parts(size(self.own.ranges))),
                2 if self.shape.itemsize != _FLOAT32 else 1,
            )
            yield Convert(
                _FLOAT32 * (copies * number + self.shape.batch * self.shape.kv_heads)
                if number
                else 0
            )
        return coded

    def decode(self, coded: Buffer) -> Steps[Buffer]:
        """Decode a received block: ``coded`` itself if it needs no conversion."""
        if not self.is_converted:
            coded.holders += 1
            return coded
        # Keys, then values, become float32, are multiplied by their factor and converted to the inputs' dtype.
        itemsize, number = self.shape.itemsize, size(coded.ranges)
        if self.is_scaled:
            keys, values = self.parts(number)
            copies = _FLOAT32 + (
                _FLOAT32 if itemsize == _FLOAT32 else max(_FLOAT32, itemsize)
            )
            yield Convert(max(copies * keys, itemsize * keys + copies * values))
        return (yield from make(itemsize * self.numbers * number, coded.ranges))

    def parts(self, tokens: int) -> tuple[int, int]:
        heads = tokens * self.shape.batch * self.shape.kv_heads
        return heads * self.shape.head_dim, heads * self.shape.value_dim

    def post(
        self,
        message: int,
        sends: list[tuple[int, Buffer]],
        receives: list[tuple[Send, int]],
        extra: int = 0,
    ) -> Steps[list[Coming]]:
        """Start a transfer without empty messages. ``receives`` has tokens and the bytes of each."""
        arrivals: list[Buffer | None] = []
        for (_, ranges), token in receives:
            arrivals.append(
                (yield from make(token * size(ranges) + extra, ranges))
                if ranges
                else None
            )
        sent = tuple(Message(peer, buffer) for peer, buffer in sends if buffer.ranges)
        received = tuple(
            Message(one.peer, x)
            for (one, _), x in zip(receives, arrivals, strict=True)
            if x
        )
        transfer = Transfer(
            self.first_message + message,
            [message.buffer for message in sent],
            not sent + received,
        )
        for buffer in transfer.sends:
            buffer.holders += 1
        if sent or received:
            yield Post(transfer.number, sent, received)
        return [Coming(transfer, arrival) for arrival in arrivals]

    def wait(self, coming: Coming) -> Steps[Buffer | None]:
        transfer = coming.transfer
        if not transfer.is_over:
            yield Wait(transfer.number)
            yield from drop(*transfer.sends)
            transfer.is_over = True
        return coming.arrival

    def _add(self, coming: Coming, total: Sum | None = None) -> Iterator[Event]:
        arrival = yield from self.wait(coming)
        if arrival is None:
            return
        for start, stop in arrival.ranges:
            yield from total.add(start, stop) if total else [Accumulate(0)]
        yield from drop(arrival)

    def _collect(self, total: Sum | None = None) -> Iterator[Event]:
        while self.returning:
            yield from self._add(self.returning.pop(0), total)

    def _launches(self, hop: Hop, *packed: Ranges) -> Iterator[KernelLaunch]:
        if self.part.kernel is None:
            return iter(())
        queries = self.part.schedule.passes_queries
        return within_ranges(
            self.part.kernel.launches, hop.bands, *packed, passes_queries=queries
        )

    def _compute(self, hop: Hop, block: Buffer, total: Sum) -> Iterator[Event]:
        return self.run(hop, self._launches(hop, block.ranges), total)

    def run(
        self, work: Hop | Stage, launches: Iterable[KernelLaunch], total: Sum
    ) -> Iterator[Event]:
        yield Compute(work, 0)
        if self.part.kernel is None and work.bands:
            yield from total.running()
        for launch in launches:
            assert self.part.kernel is not None, "it has launches"
            yield from total.run(launch, self.part.kernel.forward_bytes(launch))

    def _backward_bytes(self, hop: Hop, block: Buffer, total: Buffer) -> int:
        kernel, launches = (
            self.part.kernel,
            self._launches(hop, block.ranges, total.ranges),
        )
        return (
            max((kernel.backward_bytes(launch).most for launch in launches), default=0)
            if kernel
            else 0
        )

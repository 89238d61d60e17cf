"""Events of one rank in one pass, in order: allocate, free, send, wait, compute, add.

``ringspan.torch.engine.attention`` carries out exactly these (tested); times (``timing``) and memory
(``plan/cost/loop.py``) are read off them. No event creates a pass's inputs and results. n tokens.
"""

from collections.abc import Iterator
from itertools import pairwise

from ringspan.core.geometry.ranges import Ranges, size
from ringspan.core.schedule.gather import Gathered, Stage
from ringspan.core.schedule.kernel_launches import KernelLaunch, whole
from ringspan.core.schedule.steps import (
    MESSAGES_PER_HOP,
    Accumulate,
    Buffer,
    Coming,
    Compute,
    DeferredSum,
    Event,
    Launch,
    Message,
    Part,
    Post,
    Steps,
    Transfer,
    Waiting,
    drop,
    make,
)
from ringspan.core.schedule.walk import Walk
from ringspan.core.schedule.workspace import Gradients


def forward(part: Part) -> Iterator[Event]:
    """Yield the events of a forward pass, group of heads by group."""
    if part.schedule.gathered is not None:
        yield from _forward_of_gathered(part, part.schedule.gathered)
        return
    # A group's sums and last arrival: the loop's variables hold them until the next group has its own.
    last: list[Buffer] = []
    for number in range(part.head_groups):
        last = yield from Walk(part, number).forward(last)
    yield from drop(*last)


def backward(part: Part) -> Iterator[Event]:
    """Yield the events of a backward pass, which sends keys and values (``Route.backward``)."""
    if part.schedule.gathered is not None:
        yield from _backward_of_gathered(part, part.schedule.gathered)
        return
    unfinished: list[Walk] = []
    for number in range(part.head_groups):
        walk = Walk(part, number)
        yield from walk.backward(unfinished)
        unfinished.append(walk)
    yield from unfinished.pop().finish()


def _forward_of_gathered(part: Part, plan: Gathered) -> Iterator[Event]:
    for walk in _groups(part, plan):
        keys, total = (yield from walk.keys()), walk.total()
        for stage in walk.plan.stages:
            yield from walk.arrive(stage)
            yield from walk.run(stage, walk.launches(stage), total)
        yield from drop(keys)
        yield from total.finish()
        yield from drop(total.buffer)


def _backward_of_gathered(part: Part, plan: Gathered) -> Iterator[Event]:
    unfinished: list[_Gathering] = []
    for walk in _groups(part, plan):
        yield from walk.differentiate((yield from walk.keys()))
        if unfinished:
            yield from unfinished.pop().finish()
        unfinished.append(walk)
    yield from unfinished.pop().finish()


def _groups(part: Part, plan: Gathered) -> list["_Gathering"]:
    plan = plan.suited(part.kernel.launches if part.kernel else whole)
    walks = [_Gathering(part, number, plan) for number in range(part.head_groups)]
    for walk, following in pairwise(walks):
        walk.following = following
    return walks


class _Gathering(Walk):
    """One group of heads of passes that fetch all keys at once (``torch.attention.gathered``)."""

    following: "_Gathering | None" = None

    def __init__(self, part: Part, number: int, plan: Gathered) -> None:
        super().__init__(part, number)
        self.first_message, self.plan = MESSAGES_PER_HOP * number, plan
        self._in_place = part.in_place and not self.is_converted
        self._token = self.shape.itemsize * self.numbers
        self._coming: list[Coming] = []
        self._keys: Buffer | None = None

    def launches(self, stage: Stage) -> tuple[KernelLaunch, ...]:
        return (
            () if self.part.kernel is None else self.part.kernel.launches(stage.bands)
        )

    def fetch(self) -> Steps[None]:
        """Start receiving this group's keys from their owners, and sending the rank's own.

        In place, they arrive in the kernel's input. Else each message has a buffer of its own, which ``arrive``
        decodes into the keys; peers that need the same ranges share a packed copy.
        """
        if self._in_place:
            self._keys = yield from make(self._token * self.plan.num_keys)
            for sides in self.plan.posts:
                sends, receives = (
                    tuple(
                        Message(one.peer, Buffer(self._token * one.size))
                        for one in side
                    )
                    for side in sides
                )
                self._coming.append(
                    Coming(Transfer(self.first_message, [], is_over=False), None)
                )
                yield Post(self.first_message, sends, receives)
            return
        sends = [
            (send.peer, send.ranges) for _, send in self.hops[0].sends if send.ranges
        ]
        coded = (yield from self.encode()) if sends and self.is_converted else self.own
        packed: dict[Ranges, Buffer] = {}
        for _, ranges in sends:
            if ranges not in packed:
                packed[ranges] = yield from self.pack(coded, ranges)
        receives = [(hop.arrives, self.sent_token) for hop in self.hops[1:]]
        self._coming = yield from self.post(
            0, [(peer, packed[r]) for peer, r in sends], receives, self.factors
        )
        yield from drop(coded, *packed.values())

    def keys(self) -> Steps[Buffer]:
        """Return the group's keys on their way, with the next group's transfers started."""
        if not self.first_message:
            yield from self.fetch()
        if self.following is not None:
            yield from self.following.fetch()
        return self._keys or (yield from make(self._token * self.plan.num_keys))

    def arrive(self, stage: Stage) -> Iterator[Event]:
        """Wait for all keys before the last stage."""
        for each in self._coming if stage is self.plan.stages[-1] else ():
            if (arrival := (yield from self.wait(each))) is not None:
                block = yield from self.decode(arrival)
                yield from drop(block, arrival)

    def differentiate(self, keys: Buffer) -> Iterator[Event]:
        """Compute dq, dk and dv stage by stage as keys arrive, then send dk and dv to the keys' owners.

        Gradients add up in float32 (``sum_itemsize``). Those of 16-bit inputs (``is_short``) may wait for each other,
        and each row is then written once; dq is written in 16 bits, dk and dv as they are sent.
        """
        part = self.part
        is_short = self.shape.itemsize < self.shape.sum_itemsize
        sums = self._gradient_sums(is_short=is_short)
        for stage in self.plan.stages:
            yield from self.arrive(stage)
            yield Compute(stage, 0)
            yield from self._add_stage(stage, sums, is_short=is_short)
        yield from drop(keys)
        yield from sums[0].write(0, part.tokens, is_short=is_short)
        yield from sums[0].free()
        returns_short = self._returned_itemsize < self.shape.sum_itemsize
        token, _ = self.gradient_token
        self.sums = yield from make(
            token * part.key_tokens if returns_short else 0, is_sum=True
        )
        yield from self._send_to_owners(sums[1:])
        for each in sums[1:]:
            yield from each.free()

    def _gradient_sums(self, *, is_short: bool) -> list[DeferredSum]:
        """Return the empty sums of dq, dk and dv; dq of other inputs than 16-bit ones adds up in the result itself."""
        shape, queries, keys = self.shape, self.part.tokens, self.plan.num_keys
        query_token = shape.query_numbers * shape.sum_itemsize if is_short else 0
        return [
            DeferredSum(query_token, queries),
            *(
                DeferredSum(shape.sum_itemsize * number, keys)
                for number in self.parts(1)
            ),
        ]

    def _add_stage(
        self, stage: Stage, sums: list[DeferredSum], *, is_short: bool
    ) -> Iterator[Event]:
        """Add a stage's gradients to the sums, launch by launch, or at once by a kernel that adds in place."""
        kernel = self.part.kernel
        if not is_short or (kernel is None and stage.bands):
            for each in sums:
                yield from each.running()
        for launch in self.launches(stage):
            assert kernel is not None, "it has launches"
            yield from self._launch(launch, kernel.backward_bytes(launch), sums)

    def _send_to_owners(self, sums: list[DeferredSum]) -> Iterator[Event]:
        """Write dk and dv of other ranks' keys as they are sent; start to send them, and to receive this rank's."""
        token, sent_token = self.gradient_token
        sends: list[tuple[int, Buffer]] = []
        for hop in self.hops[1:]:
            ranges = hop.gradient_to_owner
            if not ranges:
                continue
            message = yield from make(sent_token * size(ranges), ranges)
            sends.append((hop.owner, message))
            for piece in self.plan.of(hop.owner):
                places = piece.places
                for each in sums:
                    yield from each.write(
                        places.start, places.stop, is_short=sent_token < token
                    )
        receives = [(hop.from_visitor, sent_token) for hop in self.hops[1:]]
        self.returning = yield from self.post(1, sends, receives)
        yield from drop(*(buffer for _, buffer in sends))

    def _launch(
        self, launch: KernelLaunch, taken: Gradients, sums: list[DeferredSum]
    ) -> Iterator[Event]:
        """Run a launch, then add its dq, dk and dv to the sums, or keep them waiting."""
        if not any(taken.values):
            for each in sums:
                yield from each.running()
        yield Launch(taken.most)
        ends, made = (launch.k0, launch.k1), list[Buffer]()
        for num_bytes in taken.values:
            made.append((yield from make(num_bytes)))
        for each, value, rows in zip(
            sums, made, ((launch.q0, launch.q1), ends, ends), strict=True
        ):
            yield from each.add(*rows, value, is_short=taken.is_short)

    @property
    def _returned_itemsize(self) -> int:
        return self.part.kv_itemsize or self.shape.itemsize

    def finish(self) -> Iterator[Event]:
        """Sum all ranks' gradients of this rank's keys."""
        waiting, mine = Waiting(self.part.key_tokens), Buffer(0)
        for piece in self.plan.of(self.part.schedule.rank):
            waiting.add(piece.start, piece.stop, mine)
        for each in self.returning:
            if (arrival := (yield from self.wait(each))) is not None:
                for start, stop in arrival.ranges:
                    waiting.add(start, stop, Buffer(0))
        if self._returned_itemsize < self.shape.sum_itemsize:
            for start, stop, values in waiting.of():
                yield Accumulate(
                    self.shape.sum_itemsize * max(self.parts(stop - start))
                    if values > 1
                    else 0
                )
        yield from drop(
            self.sums, *(each.arrival for each in self.returning if each.arrival)
        )

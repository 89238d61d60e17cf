"""Events of a pass, and their buffers and sums. H query heads, G key/value heads, n tokens."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from ringspan.core.codec import UNCHANGED, Sent
from ringspan.core.geometry.ranges import Ranges, minus, size, union
from ringspan.core.schedule.gather import Stage
from ringspan.core.schedule.kernel_launches import KernelLaunch
from ringspan.core.schedule.merging import is_full, segments
from ringspan.core.schedule.schedule import Hop, Schedule
from ringspan.core.schedule.workspace import (
    Kernel,
    Shape,
    Taken,
    merge_bytes,
    merge_many_bytes,
)

MESSAGES_PER_HOP = 2  # keys and values before the computation, gradients after it


@dataclass(frozen=True)
class Part:
    """One rank's part in a pass of one attention, like ``ringspan.torch.engine.attention.part.Ring``.

    ``shape`` is of all heads, run in ``head_groups`` in turn; ``tokens`` and ``key_tokens`` are the rank's. ``kernel``
    gives a launch's bytes, None if it adds in place. ``kv_itemsize``: bytes of a number in backward's dk and dv, None
    for those of ``shape``. ``in_place``: gathered keys arrive in place, as on all devices but CPUs.
    """

    schedule: Schedule
    shape: Shape
    tokens: int = 0
    key_tokens: int = 0
    kernel: Kernel | None = None
    sent: Sent = UNCHANGED
    head_groups: int = 1
    kv_itemsize: int | None = None
    in_place: bool = True

    @property
    def group(self) -> Shape:
        shape = self.shape
        return replace(
            shape,
            heads=shape.heads // self.head_groups,
            kv_heads=shape.kv_heads // self.head_groups,
        )


class Buffer:
    """Memory for ranges of an owner's tokens until it has no holder; ``is_sum``: float32 sums of the rank's results."""

    __slots__ = "holders", "is_sum", "num_bytes", "ranges"

    def __init__(
        self, num_bytes: int, ranges: Ranges = (), *, is_sum: bool = False
    ) -> None:
        self.num_bytes, self.ranges, self.is_sum, self.holders = (
            num_bytes,
            ranges,
            is_sum,
            1,
        )


class Message(NamedTuple):
    peer: int
    buffer: Buffer


class Make(NamedTuple):
    buffer: Buffer


class Free(NamedTuple):
    buffer: Buffer


class Post(NamedTuple):
    number: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class Wait(NamedTuple):
    number: int


class Work(NamedTuple):
    """Computing that takes as long as attention of ``num_pairs`` pairs of a query and a key."""

    num_pairs: float


class Compute(NamedTuple):
    """The tiles of a hop, of a stage of gathered keys, or other work; its largest launch takes ``num_bytes``."""

    hop: Hop | Stage | Work
    num_bytes: int


class Launch(NamedTuple):
    num_bytes: int


class Accumulate(NamedTuple):
    num_bytes: int


class Convert(NamedTuple):
    """Convert into or out of the communication dtype."""

    num_bytes: int


Event = Make | Free | Post | Wait | Compute | Launch | Accumulate | Convert
T = TypeVar("T")
Steps = Generator[Event, None, T]


@dataclass
class Transfer:
    number: int
    sends: list[Buffer]
    is_over: bool


class Coming(NamedTuple):
    transfer: Transfer
    arrival: Buffer | None  # None if nothing comes


class Sum:
    """Running sum of partials in ``buffer`` (``torch.kernels.partials.Partial``), and the rows it covers."""

    def __init__(self, shape: Shape, buffer: Buffer) -> None:
        self.buffer, self._shape = buffer, shape
        self._rows: Ranges = ()

    def merge(self, start: int, stop: int, *, is_short: bool, partials: int = 1) -> int:
        rows, missing = stop - start, size(minus(((start, stop),), self._rows))
        self._rows = union(self._rows, ((start, stop),))
        if missing == rows:
            return merge_many_bytes(self._shape, rows, partials)
        if partials == 1:
            return merge_bytes(self._shape, rows, converts=is_short)
        return merge_many_bytes(self._shape, rows, partials + 1)

    def running(self) -> Iterator[Event]:
        return iter(())

    def run(self, launch: KernelLaunch, taken: Taken) -> Iterator[Event]:
        yield Launch(taken.most)
        merging = self.merge(launch.q0, launch.q1, is_short=taken.is_short)
        if taken.partial:
            yield Accumulate(taken.partial + merging)

    def add(self, start: int, stop: int) -> Iterator[Event]:
        yield Accumulate(self.merge(start, stop, is_short=False))

    def finish(self) -> Iterator[Event]:
        return iter(())


class Waiting:
    """Values of ``rows`` that wait for each other (``torch.kernels.partials.Waiting``)."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._ends: list[tuple[int, int]] = []
        self._held: list[Buffer] = []

    def add(self, start: int, stop: int, value: Buffer) -> bool:
        """Let a value wait; return True if too many rows wait then."""
        self._ends.append((start, stop))
        self._held.append(value)
        return is_full(sum(stop - start for start, stop in self._ends), self.rows)

    def of(
        self, first: int = 0, last: int | None = None
    ) -> Iterator[tuple[int, int, int]]:
        """Yield all parts of some rows, and the number of values that wait for each."""
        for start, stop, numbers in segments(tuple(self._ends), self.rows):
            start, stop = (
                max(start, first),
                min(stop, self.rows if last is None else last),
            )
            if start < stop:
                yield start, stop, len(numbers)

    def clear(self) -> Iterator[Event]:
        yield from drop(*self._held)
        self._ends, self._held = [], []


class Deferred(Sum):
    """Partials of a 16-bit result, which wait for each other (``torch.kernels.partials.Deferred``)."""

    def __init__(self, shape: Shape, rows: int) -> None:
        super().__init__(shape, Buffer(0, is_sum=True))
        self._waiting = Waiting(rows)
        self._is_folded = False

    def run(self, launch: KernelLaunch, taken: Taken) -> Iterator[Event]:
        if not taken.is_short:
            yield from self.running()
            yield from super().run(launch, taken)
            return
        yield Launch(taken.most)
        if self._waiting.add(launch.q0, launch.q1, (yield from make(taken.partial))):
            yield from self.running()

    def add(self, start: int, stop: int) -> Iterator[Event]:
        yield from self.running()
        yield from super().add(start, stop)

    def finish(self) -> Iterator[Event]:
        for start, stop, partials in self._waiting.of():
            yield Accumulate(
                merge_many_bytes(self._shape, stop - start, partials + self._is_folded)
            )
        yield from self._waiting.clear()

    def running(self) -> Iterator[Event]:
        if not self._is_folded:
            row = self._shape.batch * self._shape.heads * self._shape.sum_itemsize
            self.buffer = yield from make(
                row * self._shape.value_dim * self._waiting.rows, is_sum=True
            )
            self._is_folded = True
        for start, stop, partials in self._waiting.of():
            if partials:
                yield Accumulate(
                    self.merge(start, stop, is_short=True, partials=partials)
                )
        yield from self._waiting.clear()


class DeferredSum:
    """A gradient of a gathered pass (``torch.attention.block.DeferredSum``): ``token`` bytes as it adds up."""

    def __init__(self, token: int, rows: int) -> None:
        self._token, self._waiting = token, Waiting(rows)
        self._buffer: Buffer | None = None

    def add(
        self, start: int, stop: int, value: Buffer, *, is_short: bool
    ) -> Iterator[Event]:
        """Add a value to the sum; a 16-bit one waits for others first."""
        if not is_short or self._waiting.add(start, stop, value):
            yield from self.running()
        if not is_short:
            yield from drop(value)

    def running(self) -> Iterator[Event]:
        """Allocate the float32 sum, unless it exists, and add the waiting values to it."""
        if self._buffer is None:
            self._buffer = yield from make(self._token * self._waiting.rows)
        yield from self._waiting.clear()

    def write(self, first: int, last: int, *, is_short: bool) -> Iterator[Event]:
        """Write the sum of some rows, in 16 bits if ``is_short``."""
        for start, stop, values in self._waiting.of(first, last):
            if is_short and values + (self._buffer is not None) > 1:
                yield Accumulate(self._token * (stop - start))

    def free(self) -> Iterator[Event]:
        yield from self._waiting.clear()
        yield from drop(*([self._buffer] if self._buffer else []))


def make(num_bytes: int, ranges: Ranges = (), *, is_sum: bool = False) -> Steps[Buffer]:
    buffer = Buffer(num_bytes, ranges, is_sum=is_sum)
    if num_bytes:
        yield Make(buffer)
    return buffer


def drop(*buffers: Buffer) -> Iterator[Free]:
    for buffer in buffers:
        buffer.holders -= 1
        if buffer.num_bytes and not buffer.holders:
            yield Free(buffer)


def held(coming: list[Coming]) -> list[Buffer]:
    arrivals = [each.arrival for each in coming if each.arrival]
    for arrival in arrivals:
        arrival.holders += 1
    return arrivals


def pack(
    whole: Buffer,
    ranges: Ranges,
    token: int,
    factors: int = 0,
    *,
    can_hand_on: bool = True,
) -> Steps[Buffer]:
    if can_hand_on and ranges == whole.ranges:
        whole.holders += 1
        return whole
    return (yield from make(token * size(ranges) + factors, ranges))

"""The only point-to-point calls: what one rank of a ring sends to and receives from the others."""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.torch.transport.agreement import queues_of, report_out_of_step
from ringspan.torch.transport.clock import Moment, now
from ringspan.torch.transport.queue import Expected, OutOfStepError, SharedQueues


@dataclass
class Passage:
    """One exchange of blocks: when it was posted, when this rank began to wait for it, and when it went on."""

    hop: int
    is_gradient: bool
    sent_bytes: int
    received_bytes: int
    device: torch.device
    posted: Moment
    waited: Moment | None = None
    arrived: Moment | None = None


@dataclass
class Visit:
    """One hop's computation: with whose block, how many (query, key) pairs, and from when until when."""

    owner: int
    num_pairs: int
    started: Moment
    ended: Moment | None = None


@dataclass
class Totals:
    """What this process has sent and how long it has waited, over all exchanges, and where it is.

    Written by the ring, read by benchmarks and, in another thread, by the watchdog. ``hop`` is that of the last
    exchange in its pass, which numbers two messages a hop; each further group of heads goes on counting. Where lists
    are put for ``passages`` and ``visits``, every exchange and every hop is noted in them.
    """

    num_posts: int = 0
    num_sends: int = 0
    sent_bytes: int = 0
    exposed_seconds: float = 0.0
    hop: int | None = None
    passages: list[Passage] | None = None
    visits: list[Visit] | None = None


TOTALS: Final = Totals()


@dataclass(frozen=True)
class Room:
    """What a message needs: a contiguous tensor of this shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def like(x: Tensor) -> "Room":
        return Room(tuple(x.shape), x.dtype, x.device)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Such a tensor, uninitialised."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def on(self, memory: Tensor) -> Tensor:
        """Such a tensor on these bytes."""
        return memory.view(self.dtype).view(self.shape)


@dataclass
class Arrival:
    """A message on its way to this rank: into ``message``, or into memory that its sender shares."""

    sender: int
    room: Room
    message: Tensor | None
    expected: Expected | None = None

    def read(self) -> Tensor:
        """The message, once its transfer was waited for. It may lie with its sender, as long as it is kept, and may not
        be changed.
        """
        assert self.message is not None, "it was waited for"
        return self.message


class Transfer:
    """Sends and receives under way. What is sent must stay as it is until ``wait`` returns."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        sends: Sequence[Tensor],
        passage: Passage | None = None,
        receive: Callable[[], None] | None = None,
    ) -> None:
        """``receive`` waits for what is none of the works."""
        self._works, self._sends, self._passage, self._receive = list(works), list(sends), passage, receive

    def wait(self) -> None:
        """Block (on CUDA: make the current stream wait) until everything has arrived and been sent."""
        started = time.perf_counter()
        passage, self._passage = self._passage, None  # a transfer may be waited for again
        if passage:
            passage.waited = now(passage.device)
        for work in self._works:
            work.wait()
        if self._receive:
            self._receive()
            self._receive = None
        if passage:
            passage.arrived = now(passage.device)
        self._works.clear()
        self._sends.clear()
        TOTALS.exposed_seconds += time.perf_counter() - started


class Exchange:
    """Point-to-point messages within one group during one pass.

    Peers are group ranks, or indices into ``ranks`` when it is given. ``signature`` names the pass; with the message
    number it makes the tag, so that a rank that is ahead, or in another pass, never has its blocks mistaken.
    """

    def __init__(self, group: dist.ProcessGroup | None, signature: str, ranks: Sequence[int] | None = None) -> None:
        self._group = group
        self._signature = signature
        self._ranks = ranks
        self._queues = queues_of(group) if group is not None else None
        # Gloo keys its buffers by an int32 tag; leave room below it for the message numbers of one pass.
        self._tag: Final = int.from_bytes(hashlib.sha256(signature.encode()).digest()[:4], "big") % (1 << 30)

    def among(self, ranks: Sequence[int], name: str) -> "Exchange":
        """The same pass between some of the ranks, which are its peers 0, 1, ..."""
        return Exchange(self._group, f"{self._signature} {name}", ranks)

    def empty(self, room: Room) -> Tensor:
        """Where to make a message that is to be sent once: uninitialised, and where its receiver can read it, if any
        place is.
        """
        memory = None
        if self._queues and room.device.type == "cpu":
            memory = self._queues.memory.allocate(room.nbytes)
        return room.empty() if memory is None else room.on(memory)

    def post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Room]], message: int
    ) -> tuple[Transfer, list[Arrival]]:
        """Start all sends (to, buffer) and receives (from, room) of one moment together, so that no order of ranks
        blocks; what to wait for, and what will have arrived then, in the order of ``receives``.

        Between one pair of ranks the order of sends is the order of receives. Buffers are contiguous.
        """
        assert self._group is not None or not (sends or receives), "a single rank has nobody to talk to"
        arrivals = [self._arrival(self._rank(peer), room, message) for peer, room in receives]
        outgoing: list[tuple[int, Tensor]] = []
        for rank, buffer in ((self._rank(peer), buffer) for peer, buffer in sends):
            if queues := self._queues_with(rank, buffer.device):
                queues.send(buffer, rank, self._tag + message)
            else:
                outgoing.append((rank, buffer))
        # Receives first: over gloo a receive asks for its message on the connection that also carries the sends, and a
        # request behind a block waits for that block, so that the two directions take turns instead of overlapping.
        operations = [self._operation(dist.irecv, a.sender, a.read(), message) for a in arrivals if not a.expected]
        operations += [self._operation(dist.isend, rank, buffer, message) for rank, buffer in outgoing]
        works = dist.batch_isend_irecv(operations) if operations else []
        TOTALS.num_posts += 1
        TOTALS.hop = message // 2
        TOTALS.num_sends += len(sends)
        TOTALS.sent_bytes += sum(buffer.nbytes for _, buffer in sends)
        kept = [buffer for _, buffer in outgoing]
        return Transfer(works, kept, _passage(sends, receives, message), partial(self._receive, arrivals)), arrivals

    def _rank(self, peer: int) -> int:
        return peer if self._ranks is None else self._ranks[peer]

    def _arrival(self, rank: int, room: Room, message: int) -> Arrival:
        if queues := self._queues_with(rank, room.device):
            return Arrival(rank, room, None, queues.expect(rank, self._tag + message, room.nbytes))
        return Arrival(rank, room, room.empty())

    def _receive(self, arrivals: Sequence[Arrival]) -> None:
        """Wait for what comes through shared memory.

        Raises:
            PeerMismatch: on every rank of the group alike, when a rank finds that another does not do the same.
            RuntimeError: a rank is gone.
        """
        for arrival in arrivals:
            if arrival.expected is None:
                continue
            assert self._queues is not None and self._group is not None, "it expects the message"
            try:
                arrival.message = arrival.room.on(self._queues.receive(arrival.expected))
            except OutOfStepError as error:
                report_out_of_step(self._group, str(error))

    def _queues_with(self, rank: int, device: torch.device) -> SharedQueues | None:
        """The shared-memory queues to and from a rank; None where messages go through the process group."""
        return self._queues if self._queues and device.type == "cpu" and self._queues.carries(rank) else None

    def _operation(self, call: Any, rank: int, buffer: Tensor, message: int) -> dist.P2POp:
        return dist.P2POp(call, buffer, group=self._group, tag=self._tag + message, group_peer=rank)


def _passage(sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Room]], message: int) -> Passage | None:
    """The note of an exchange that has just been posted, where notes are taken."""
    messages = [*sends, *receives]
    if TOTALS.passages is None or not messages:
        return None
    sent, received = (sum(message.nbytes for _, message in each) for each in (sends, receives))
    device = messages[0][1].device
    TOTALS.passages.append(Passage(message // 2, bool(message % 2), sent, received, device, now(device)))
    return TOTALS.passages[-1]

"""All point-to-point communication: what one rank of a ring sends to and receives from the others."""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.torch.engine.transport.agreement import (
    NOTHING,
    queues_of,
    report_out_of_step,
)
from ringspan.torch.engine.transport.clock import Moment, now
from ringspan.torch.engine.transport.queue import Expected, OutOfStepError, SharedQueues


@dataclass
class TransferRecord:
    """Messages of one post: which ranks of the group get one, and when all had arrived that came from others.

    ``arrivals``: senders of single messages, with the moments when the waits for these ended, in their order;
    ``thread_seconds``: of this thread's CPU time while it waited.
    """

    hop: int
    is_gradient: bool
    sent_bytes: int
    received_bytes: int
    device: torch.device
    posted: Moment
    sent_to: tuple[int, ...] = ()
    waited: Moment | None = None
    arrived: Moment | None = None
    arrivals: list[tuple[int, Moment]] = field(default_factory=list)
    thread_seconds: float = 0.0

    def note_arrival(self, sender: int) -> None:
        self.arrivals.append((sender, now(self.device)))


@dataclass
class HopRecord:
    """Computation of one hop: source rank of its block, number of (query, key) pairs, begin and end.

    ``waits``: transfers that were waited for within it; ``thread_seconds``: of this thread's CPU time.
    """

    owner: int
    num_pairs: int
    started: Moment
    ended: Moment | None = None
    waits: list[TransferRecord] = field(default_factory=list)
    thread_seconds: float = 0.0


@dataclass
class Counters:
    """This process's sent bytes and waiting time, and its current hop, which counts on over head groups.

    The ring writes it; benchmarks and the watchdog's thread read it. Lists exist while ``recorded`` is active.
    """

    num_posts: int = 0
    num_sends: int = 0
    sent_bytes: int = 0
    exposed_seconds: float = 0.0
    hop: int | None = None
    transfers: list[TransferRecord] | None = None
    hops: list[HopRecord] | None = None


COUNTERS: Final = Counters()


Records = tuple[list[TransferRecord], list[HopRecord]]


@contextmanager
def recorded() -> Iterator[Records]:
    records = begin_records()
    try:
        yield records
    finally:
        end_records()


def begin_records() -> Records:
    """Record transfers and hops into new lists from now on, and return these."""
    COUNTERS.transfers, COUNTERS.hops = records = (
        list[TransferRecord](),
        list[HopRecord](),
    )
    return records


def end_records() -> None:
    COUNTERS.transfers = COUNTERS.hops = None


def hop_recorded(
    owner: int, num_pairs: int, device: torch.device
) -> AbstractContextManager[None]:
    """Record the computation inside as a hop with a block of ``owner``, if records are on."""
    if COUNTERS.hops is None:
        return NOTHING
    return _recording(COUNTERS.hops, owner, num_pairs, device)


@contextmanager
def _recording(
    hops: list[HopRecord], owner: int, num_pairs: int, device: torch.device
) -> Iterator[None]:
    record = HopRecord(owner, num_pairs, now(device))
    record.thread_seconds = -time.thread_time()
    hops.append(record)
    yield
    record.ended = now(device)
    record.thread_seconds += time.thread_time()


# Named tuples, here and of what is sent: a hop makes several, and data classes are slow to make.
class TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def like(x: Tensor) -> "TensorSpec":
        return TensorSpec(tuple(x.shape), x.dtype, x.device)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def on(self, memory: Tensor) -> Tensor:
        return memory.view(self.dtype).view(self.shape)


@dataclass
class PendingReceive:
    """A posted receive: into ``message``, or in its sender's shared memory."""

    sender: int
    spec: TensorSpec
    message: Tensor | None
    expected: Expected | None = None

    @staticmethod
    def of(sender: int, asked: TensorSpec | Tensor) -> "PendingReceive":
        """Return a receive into a new message, or into the tensor that is given."""
        if isinstance(asked, Tensor):
            return PendingReceive(sender, TensorSpec.like(asked), asked)
        return PendingReceive(sender, asked, asked.empty())

    def read(self) -> Tensor:
        """Return the message after its transfer; read-only, as it may lie in its sender's memory."""
        assert self.message is not None, "it was waited for"
        return self.message


class Transfer:
    """Sends and receives under way. What is sent must stay as it is until ``wait`` returns."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        sends: Sequence[Tensor],
        record: TransferRecord | None = None,
        receive: Callable[[], None] | None = None,
        senders: Sequence[int] = (),
    ) -> None:
        """Let ``receive`` wait for shared-memory messages, instead of ``works``; ``senders``: of the first works."""
        self._works, self._sends, self._record, self._receive = (
            list(works),
            list(sends),
            record,
            receive,
        )
        self._senders = senders

    def wait(self) -> None:
        """Block (on CUDA: make the current stream wait) until everything has arrived and been sent."""
        started = time.perf_counter()
        record, self._record = self._record, None  # a transfer may be waited for again
        if record:
            record.waited = now(record.device)
            record.thread_seconds = -time.thread_time()
            if COUNTERS.hops and COUNTERS.hops[-1].ended is None:
                COUNTERS.hops[-1].waits.append(record)
        for number, work in enumerate(self._works):
            work.wait()
            if record and number < len(self._senders):
                record.note_arrival(self._senders[number])
        if self._receive:
            self._receive()
            self._receive = None
        if record:
            record.arrived = now(record.device)
            record.thread_seconds += time.thread_time()
        # Sent tensors may be large, so they are freed even if the transfer is still held.
        self._works.clear()
        self._sends.clear()
        COUNTERS.exposed_seconds += time.perf_counter() - started


@lru_cache(maxsize=1024)
def _tag_of(signature: str) -> int:
    """Return a number for a pass's messages.

    Gloo keys its buffers by an int32 tag, so there is room below it for the message numbers of one pass.
    """
    digest = hashlib.sha256(signature.encode()).digest()
    return int.from_bytes(digest[:4], "big") % (1 << 30)


class Exchange:
    """Point-to-point messages within one group during one pass; peers are group ranks, or indices into ``ranks``.

    A tag is made from ``signature`` and the message number, so that blocks of a rank ahead, or in another pass, are
    never mistaken for others.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        signature: str,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._group = group
        self._signature = signature
        self._ranks = ranks
        self._queues = queues_of(group) if group is not None else None
        self._tag: Final = _tag_of(signature)

    def among(self, ranks: Sequence[int], name: str) -> "Exchange":
        # Other tags, since a trade within a Ulysses group has the same numbers as the ring between groups.
        return Exchange(self._group, f"{self._signature} {name}", ranks)

    def empty(self, spec: TensorSpec) -> Tensor:
        """Allocate a message that is sent once, in memory that its receiver can read if possible."""
        memory = None
        if self._queues and spec.device.type == "cpu":
            memory = self._queues.memory.allocate(spec.nbytes)
        return spec.empty() if memory is None else spec.on(memory)

    def post(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, TensorSpec | Tensor]],
        message: int,
    ) -> tuple[Transfer, list[PendingReceive]]:
        """Start all sends and receives of one moment together, so that no order blocks; buffers are contiguous.

        Between one pair of ranks the order of sends is the order of receives, and of the returned messages.
        """
        assert self._group is not None or not (sends or receives), (
            "a single rank has nobody to talk to"
        )
        sends = [(self._rank(peer), buffer) for peer, buffer in sends]
        pending = [
            self._pending(self._rank(peer), asked, message) for peer, asked in receives
        ]
        # Messages through shared memory need no request, so they are sent before the process group is asked.
        outgoing: list[tuple[int, Tensor]] = []
        for rank, buffer in sends:
            if queues := self._queues_with(rank, buffer.device):
                queues.send(buffer, rank, self._tag + message)
            else:
                outgoing.append((rank, buffer))
        # Receives come first: gloo requests a message on the connection that also carries the sends. A request after a
        # block would wait for that block, so that the two directions would take turns instead of overlapping.
        by_group = [each for each in pending if not each.expected]
        operations = [
            self._operation(dist.irecv, each.sender, each.read(), message)
            for each in by_group
        ]
        operations += [
            self._operation(dist.isend, rank, buffer, message)
            for rank, buffer in outgoing
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        kept = [buffer for _, buffer in outgoing]
        # NCCL has one work for all messages of a post, which does not tell its senders apart.
        are_single = len(works) == len(operations) or len(by_group) == 1
        senders = [each.sender for each in by_group] if are_single else []
        record = note_post(sends, receives, message)
        receive = partial(self._receive, pending, record)
        return Transfer(works, kept, record, receive, senders), pending

    def _rank(self, peer: int) -> int:
        return peer if self._ranks is None else self._ranks[peer]

    def _pending(
        self, rank: int, asked: TensorSpec | Tensor, message: int
    ) -> PendingReceive:
        if queues := self._queues_with(rank, asked.device):
            into, spec = (
                (asked, TensorSpec.like(asked))
                if isinstance(asked, Tensor)
                else (None, asked)
            )
            return PendingReceive(
                rank, spec, into, queues.expect(rank, self._tag + message, spec.nbytes)
            )
        return PendingReceive.of(rank, asked)

    def _receive(
        self, pending: Sequence[PendingReceive], record: TransferRecord | None
    ) -> None:
        """Wait for shared-memory messages; raise PeerMismatch on every rank, or RuntimeError if a rank is gone."""
        for receive in pending:
            if receive.expected is None:
                continue
            assert self._queues is not None and self._group is not None, (
                "it expects the message"
            )
            try:
                arrived = receive.spec.on(self._queues.receive(receive.expected))
                receive.message = (
                    arrived
                    if receive.message is None
                    else receive.message.copy_(arrived)
                )
            except OutOfStepError as error:
                # Tell the other ranks, so that all raise and none waits for the time-out.
                report_out_of_step(self._group, str(error))
            if record:
                record.note_arrival(receive.sender)

    def _queues_with(self, rank: int, device: torch.device) -> SharedQueues | None:
        return (
            self._queues
            if self._queues and device.type == "cpu" and self._queues.carries(rank)
            else None
        )

    def _operation(
        self, call: Callable[..., object], rank: int, buffer: Tensor, message: int
    ) -> dist.P2POp:
        return dist.P2POp(
            call, buffer, group=self._group, tag=self._tag + message, group_peer=rank
        )


def note_post(
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, TensorSpec | Tensor]],
    message: int,
) -> TransferRecord | None:
    """Count a post to ranks of the group; return its record, or None if records are off."""
    COUNTERS.num_posts += 1
    COUNTERS.hop = message // 2
    COUNTERS.num_sends += len(sends)
    COUNTERS.sent_bytes += sum(buffer.nbytes for _, buffer in sends)
    messages = [*sends, *receives]
    if COUNTERS.transfers is None or not messages:
        return None
    sent, received = (
        sum(message.nbytes for _, message in each) for each in (sends, receives)
    )
    device = messages[0][1].device
    record = TransferRecord(
        message // 2, bool(message % 2), sent, received, device, now(device)
    )
    record.sent_to = tuple(rank for rank, _ in sends)
    COUNTERS.transfers.append(record)
    return record

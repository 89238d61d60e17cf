"""The only point-to-point calls: what one rank of a ring sends to and receives from the others, and what they agree on
first.
"""

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.core.errors import PeerMismatch
from ringspan.torch.clock import Moment, now
from ringspan.torch.gather import gather
from ringspan.torch.shared import PLACE, SharedMemory


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


@dataclass(frozen=True)
class Arrival:
    """A message on its way to this rank. ``carried`` is what the socket brings: itself, or its place in ``shared``."""

    sender: int
    room: Room
    carried: Tensor
    shared: SharedMemory | None = None

    def read(self) -> Tensor:
        """The message, once its transfer was waited for. It lies with the sender as long as it is kept, and may not be
        changed.
        """
        if self.shared is None:
            return self.carried
        return self.room.on(self.shared.message_at(self.carried, self.sender, self.room.nbytes))


class Transfer:
    """Sends and receives under way. What is sent must stay as it is until ``wait`` returns."""

    def __init__(self, works: Sequence[dist.Work], sends: Sequence[Tensor], passage: Passage | None = None) -> None:
        self._works, self._sends, self._passage = list(works), list(sends), passage

    def wait(self) -> None:
        """Block (on CUDA: make the current stream wait) until everything has arrived and been sent."""
        started = time.perf_counter()
        passage, self._passage = self._passage, None  # a transfer may be waited for again
        if passage:
            passage.waited = now(passage.device)
        for work in self._works:
            work.wait()
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
        self._shared = _shared.get(group) if group is not None else None
        # Gloo keys its buffers by an int32 tag; leave room below it for the message numbers of one pass.
        self._tag: Final = int.from_bytes(hashlib.sha256(signature.encode()).digest()[:4], "big") % (1 << 30)

    def among(self, ranks: Sequence[int], name: str) -> "Exchange":
        """The same pass between some of the ranks, which are its peers 0, 1, ..."""
        return Exchange(self._group, f"{self._signature} {name}", ranks)

    def empty(self, room: Room) -> Tensor:
        """Where to make a message that is to be sent once: uninitialised, and where its receiver can read it, if any
        place is.
        """
        shared = self._shared_for(room.device)
        memory = shared.allocate(room.nbytes) if shared else None
        return room.empty() if memory is None else room.on(memory)

    def post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Room]], message: int
    ) -> tuple[Transfer, list[Arrival]]:
        """Start all sends (to, buffer) and receives (from, room) of one moment together, so that no order of ranks
        blocks; what to wait for, and what will have arrived then, in the order of ``receives``.

        Between one pair of ranks the order of sends is the order of receives. Buffers are contiguous.
        """
        assert self._group is not None or not (sends or receives), "a single rank has nobody to talk to"
        # Receives first: over gloo a receive asks for its message on the connection that also carries the sends, and a
        # request behind a block waits for that block, so that the two directions take turns instead of overlapping.
        arrivals = [self._arrival(self._rank(peer), room) for peer, room in receives]
        outgoing = [(rank, self._carried(rank, buffer)) for rank, buffer in ((self._rank(p), b) for p, b in sends)]
        operations = [self._operation(dist.irecv, arrival.sender, arrival.carried, message) for arrival in arrivals]
        operations += [self._operation(dist.isend, rank, carried, message) for rank, carried in outgoing]
        works = dist.batch_isend_irecv(operations) if operations else []
        TOTALS.num_posts += 1
        TOTALS.hop = message // 2
        TOTALS.num_sends += len(sends)
        TOTALS.sent_bytes += sum(buffer.nbytes for _, buffer in sends)
        return Transfer(works, [carried for _, carried in outgoing], _passage(sends, receives, message)), arrivals

    def _rank(self, peer: int) -> int:
        return peer if self._ranks is None else self._ranks[peer]

    def _arrival(self, rank: int, room: Room) -> Arrival:
        shared = self._shared_for(room.device)
        if shared and shared.carries_from(rank, room.nbytes):
            return Arrival(rank, room, torch.empty(PLACE, dtype=torch.int64), shared)
        return Arrival(rank, room, room.empty())

    def _carried(self, rank: int, buffer: Tensor) -> Tensor:
        """What goes to a rank: the place of a message that it can read where it lies, or the message."""
        shared = self._shared_for(buffer.device)
        return shared.place_of(buffer, rank) if shared and shared.carries_to(rank, buffer.nbytes) else buffer

    def _shared_for(self, device: torch.device) -> SharedMemory | None:
        """What carries messages of tensors on a device, if anything but the socket does."""
        return self._shared if device.type == "cpu" else None

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


_KNOWN_FACTS: Final = 4096  # sets of facts remembered for a group; packed batches bring new ones with every step
_agreed: WeakKeyDictionary[dist.ProcessGroup, OrderedDict[tuple[Any, ...], None]] = WeakKeyDictionary()
_shared: WeakKeyDictionary[dist.ProcessGroup, SharedMemory] = WeakKeyDictionary()


def shared_bytes() -> int:
    """Memory that this process keeps for messages which its peers on the host read where they lie."""
    return sum(shared.reserved_bytes for shared in _shared.values())


def agree(group: dist.ProcessGroup | None, facts: dict[str, Any]) -> None:
    """Make sure that all ranks of a group were given the same facts, before any payload moves.

    Talks to the others only when these facts are new to this group, so the steady state costs nothing.

    Raises:
        PeerMismatch: on every rank alike, naming what differs and which rank was given what.
    """
    if group is None or dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        return
    known = _agreed.setdefault(group, OrderedDict())
    key = tuple(facts.items())
    if key in known:
        return
    given = gather(facts, group)
    for name in facts:
        values = [peer.get(name) if isinstance(peer, dict) else None for peer in given]
        if any(value != values[0] for value in values):
            raise PeerMismatch(
                f"the ranks of this ring were given different {name}: "
                + ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            )
    if group not in _shared and dist.get_backend(group) == "gloo":
        _shared[group] = SharedMemory(group)
    known[key] = None
    if len(known) > _KNOWN_FACTS:  # on all ranks alike, since they agree on the order
        known.popitem(last=False)

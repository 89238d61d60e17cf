"""The only point-to-point calls: what one rank of a ring sends to and receives from the others, and what they agree on
first.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from ringspan.core.errors import PeerMismatch


@dataclass
class Progress:
    """How far this process is in its exchanges; written by the ring, read by a watchdog in another thread."""

    num_posts: int = 0
    hop: int | None = None
    """Hop of the last exchange in its pass over the ring, which numbers two messages a hop; each further group of heads
    goes on counting."""


progress: Final = Progress()


class Transfer:
    """Sends and receives under way. The buffers belong to it until ``wait`` returns."""

    def __init__(self, exchange: "Exchange", works: Sequence[dist.Work], buffers: Sequence[Tensor]) -> None:
        self._exchange = exchange
        self._works = list(works)
        self._buffers = list(buffers)

    def wait(self) -> None:
        """Block (on CUDA: make the current stream wait) until everything has arrived and been sent."""
        started = time.perf_counter()
        for work in self._works:
            work.wait()
        self._works.clear()
        self._buffers.clear()
        self._exchange.exposed_seconds += time.perf_counter() - started


class Exchange:
    """Point-to-point messages within one group during one pass over the ring.

    Peers are group ranks. ``signature`` names the pass; with the message number it makes the tag, so that a rank that
    is ahead, or in another pass, never has its blocks mistaken. Counts what was sent and how long ``wait`` blocked.
    """

    def __init__(self, group: dist.ProcessGroup | None, signature: str) -> None:
        self.group = group
        self.num_sends = 0
        self.sent_bytes = 0
        self.exposed_seconds = 0.0
        # Gloo keys its buffers by an int32 tag; leave room below it for the message numbers of one pass.
        self._tag: Final = int.from_bytes(hashlib.sha256(signature.encode()).digest()[:4], "big") % (1 << 30)

    def post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], message: int
    ) -> Transfer:
        """Start all sends (to, buffer) and receives (from, buffer) of one moment together, so that no order of ranks
        blocks.

        Between one pair of ranks the order of sends is the order of receives. Buffers are contiguous.
        """
        assert self.group is not None or not (sends or receives), "a single rank has nobody to talk to"
        tag = self._tag + message
        operations = [dist.P2POp(dist.isend, b, group=self.group, tag=tag, group_peer=peer) for peer, b in sends]
        operations += [dist.P2POp(dist.irecv, b, group=self.group, tag=tag, group_peer=peer) for peer, b in receives]
        works = dist.batch_isend_irecv(operations) if operations else []
        progress.num_posts += 1
        progress.hop = message // 2
        self.num_sends += len(sends)
        self.sent_bytes += sum(buffer.nbytes for _, buffer in sends)
        return Transfer(self, works, [buffer for _, buffer in (*sends, *receives)])


_agreed: WeakKeyDictionary[dist.ProcessGroup, set[tuple[Any, ...]]] = WeakKeyDictionary()


def agree(group: dist.ProcessGroup | None, facts: dict[str, Any]) -> None:
    """Make sure that all ranks of a group were given the same facts, before any payload moves.

    Talks to the others only when these facts are new to this group, so the steady state costs nothing.

    Raises:
        PeerMismatch: on every rank alike, naming what differs and which rank was given what.
    """
    if group is None or dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        return
    known = _agreed.setdefault(group, set())
    key = tuple(facts.items())
    if key in known:
        return
    given: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(given, facts, group=group)
    for name in facts:
        values = [peer.get(name) if isinstance(peer, dict) else None for peer in given]
        if any(value != values[0] for value in values):
            raise PeerMismatch(
                f"the ranks of this ring were given different {name}: "
                + ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            )
    known.add(key)

"""The only point-to-point calls: what one rank of a ring sends to and receives from the others, and what they agree on
first.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from ringspan.core.errors import PeerMismatch


@dataclass
class Totals:
    """What this process has sent and how long it has waited, over all exchanges, and where it is.

    Written by the ring, read by benchmarks and, in another thread, by the watchdog. ``hop`` is that of the last
    exchange in its pass, which numbers two messages a hop; each further group of heads goes on counting.
    """

    num_posts: int = 0
    num_sends: int = 0
    sent_bytes: int = 0
    exposed_seconds: float = 0.0
    hop: int | None = None


TOTALS: Final = Totals()


class Transfer:
    """Sends and receives under way. The buffers belong to it until ``wait`` returns."""

    def __init__(self, works: Sequence[dist.Work], buffers: Sequence[Tensor]) -> None:
        self._works = list(works)
        self._buffers = list(buffers)

    def wait(self) -> None:
        """Block (on CUDA: make the current stream wait) until everything has arrived and been sent."""
        started = time.perf_counter()
        for work in self._works:
            work.wait()
        self._works.clear()
        self._buffers.clear()
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
        # Gloo keys its buffers by an int32 tag; leave room below it for the message numbers of one pass.
        self._tag: Final = int.from_bytes(hashlib.sha256(signature.encode()).digest()[:4], "big") % (1 << 30)

    def among(self, ranks: Sequence[int], name: str) -> "Exchange":
        """The same pass between some of the ranks, which are its peers 0, 1, ..."""
        return Exchange(self._group, f"{self._signature} {name}", ranks)

    def post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], message: int
    ) -> Transfer:
        """Start all sends (to, buffer) and receives (from, buffer) of one moment together, so that no order of ranks
        blocks.

        Between one pair of ranks the order of sends is the order of receives. Buffers are contiguous.
        """
        assert self._group is not None or not (sends or receives), "a single rank has nobody to talk to"
        # Receives first: over gloo a receive asks for its message on the connection that also carries the sends, and a
        # request behind a block waits for that block, so that the two directions take turns instead of overlapping.
        operations = [self._operation(dist.irecv, *receive, message) for receive in receives]
        operations += [self._operation(dist.isend, *send, message) for send in sends]
        works = dist.batch_isend_irecv(operations) if operations else []
        TOTALS.num_posts += 1
        TOTALS.hop = message // 2
        TOTALS.num_sends += len(sends)
        TOTALS.sent_bytes += sum(buffer.nbytes for _, buffer in sends)
        return Transfer(works, [buffer for _, buffer in (*sends, *receives)])

    def _operation(self, call: Any, peer: int, buffer: Tensor, message: int) -> dist.P2POp:
        rank = peer if self._ranks is None else self._ranks[peer]
        return dist.P2POp(call, buffer, group=self._group, tag=self._tag + message, group_peer=rank)


_KNOWN_FACTS: Final = 4096  # sets of facts remembered for a group; packed batches bring new ones with every step
_agreed: WeakKeyDictionary[dist.ProcessGroup, OrderedDict[tuple[Any, ...], None]] = WeakKeyDictionary()


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
    given: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(given, facts, group=group)
    for name in facts:
        values = [peer.get(name) if isinstance(peer, dict) else None for peer in given]
        if any(value != values[0] for value in values):
            raise PeerMismatch(
                f"the ranks of this ring were given different {name}: "
                + ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            )
    known[key] = None
    if len(known) > _KNOWN_FACTS:  # on all ranks alike, since they agree on the order
        known.popitem(last=False)

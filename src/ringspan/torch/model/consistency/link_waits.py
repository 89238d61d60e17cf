"""Waits that a link causes: the receiver waited although its message had been sent.

The k-th message of a number that one rank sends to another is the k-th of that number that the other receives. Both
note moments of their own clocks, so these are compared first: two ranks leave a gather only after both have entered it.
"""

import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ringspan.torch.engine.transport.clock import Moment
from ringspan.torch.engine.transport.exchange import TransferRecord
from ringspan.torch.runtime.host import boot_id

# Largest difference of two clocks after a second, in seconds.
_DRIFT: Final = 1e-4

Key = tuple[int, int]
"""The other rank of the group, and a message's number."""


@dataclass(frozen=True)
class Messages:
    """A step's messages of one rank, in seconds of its clock: when each was posted, and from when to when it waited."""

    posted: Mapping[Key, Sequence[float]]
    awaited: Mapping[Key, Sequence[tuple[float, float]]]


def messages_of(
    transfers: Sequence[TransferRecord], on_host: Callable[[Moment], float]
) -> Messages:
    """Return a step's messages, whose moments ``on_host`` turns into seconds."""
    posted, awaited = (
        defaultdict[Key, list[float]](list),
        defaultdict[Key, list[tuple[float, float]]](list),
    )
    for each in transfers:
        number = 2 * each.hop + each.is_gradient
        for receiver in each.sent_to:
            posted[receiver, number].append(on_host(each.posted))
        if each.waited is None:
            continue
        began = on_host(each.waited)
        for sender, moment in each.arrivals:
            ended = on_host(moment)
            awaited[sender, number].append((began, ended))
            began = ended
    return Messages(dict(posted), dict(awaited))


def waits_by_sender(
    rank: int,
    awaited: Mapping[Key, Sequence[tuple[float, float]]],
    posted: Sequence[Mapping[Key, Sequence[float]]],
    ahead: Sequence[float],
) -> dict[int, float]:
    """Return the seconds of a step that a rank waited for messages that were under way, by sender.

    ``posted`` is by rank; ``ahead`` how far each rank's clock is ahead at least. A sender is left out whose messages do
    not match what was received.
    """
    waits, unmatched = dict[int, float](), set[int]()
    for (sender, number), intervals in awaited.items():
        moments = posted[sender].get((rank, number), ())
        if len(moments) != len(intervals):
            unmatched.add(sender)
            continue
        under_way = (
            max(0.0, ended - max(began, moment - ahead[sender]))
            for moment, (began, ended) in zip(moments, intervals, strict=True)
        )
        waits[sender] = waits.get(sender, 0.0) + sum(under_way)
    return {sender: wait for sender, wait in waits.items() if sender not in unmatched}


@dataclass
class ClockBounds:
    """Bounds of how far other ranks' clocks are ahead of this one's, from gathers: (from, to) in seconds, by rank."""

    _bounds: dict[int, tuple[float, float]] = field(default_factory=dict)
    _as_of: float = 0.0

    def narrow(
        self, mine: tuple[float, float], theirs: Mapping[int, tuple[float, float]]
    ) -> None:
        """Take in when each rank entered and left a gather, on its own clock."""
        entered, left = mine
        slack = _DRIFT * max(0.0, left - self._as_of)
        self._as_of = left
        for rank, (their_enter, their_leave) in theirs.items():
            low, high = their_enter - left, their_leave - entered
            known = self._bounds.get(rank, (low, high))
            both = max(low, known[0] - slack), min(high, known[1] + slack)
            # A clock that was set meanwhile leaves nothing in common.
            self._bounds[rank] = both if both[0] <= both[1] else (low, high)

    def least_ahead(self, rank: int) -> float:
        """Return by how much a rank's clock is ahead at least, which takes its moments to be as late as they may be."""
        return self._bounds[rank][0]


def machine() -> str:
    """Return what is equal for processes that share a clock."""
    try:
        return boot_id()
    except OSError:
        return socket.gethostname()

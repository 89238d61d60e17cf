"""Traffic between ranks for a layer with a state or a convolution, as ``scan`` and ``halo`` send it."""

from collections.abc import Iterator
from typing import NamedTuple

from ringspan.core.geometry.layout import Layout
from ringspan.core.recurrence.spans import halo_loans, links_of, places_of, scan_rounds


class Sent(NamedTuple):
    """Numbers that go from one rank to another; a round waits for those before it."""

    round: int
    sender: int
    receiver: int
    numbers: int


def state_messages(
    layout: Layout, state: int, map_: int, *, reverse: bool = False
) -> Iterator[Sent]:
    """Yield one sequence's messages of states (``state`` numbers, and ``map_`` with a map), or of their gradients."""
    places = places_of(layout)
    links, last = links_of(places, ((0,),)), len(places) - 1
    for number, messages in enumerate(scan_rounds(links.reverse if reverse else links)):
        for message in messages:
            ends = message.source, message.target
            sender, receiver = (
                places[last - end if reverse else end].rank for end in ends
            )
            if sender != receiver:
                yield Sent(number, sender, receiver, state + map_ * message.has_map)


def halo_messages(
    layout: Layout, channels: int, width: int, *, reverse: bool = False
) -> Iterator[Sent]:
    """Yield the ``width`` inputs before each span, ``channels`` numbers each; or their gradients."""
    places = places_of(layout)
    for loan in halo_loans(places, width, ((0,),)):
        lender, borrower = places[loan.source].rank, places[loan.target].rank
        if lender != borrower:
            sender, receiver = (borrower, lender) if reverse else (lender, borrower)
            yield Sent(0, sender, receiver, loan.tokens * channels)

"""Order of the ranks that blocks visit over H hops, from a rank's own block at hop 0 on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.core.codec import Codec
from ringspan.core.errors import UnsupportedError
from ringspan.core.messages.numbers import described, is_a
from ringspan.core.names import ROUTE_NAMES, RouteName

ROUTE_FORMS: Final = (
    "ring, bidirectional, double-ring:I (inner rings of I ranks), all-gather, pass-q, ulysses, ulysses:U (groups of U "
    "ranks, a ring between them) or ulysses:U+ROUTE"
)

IntArray = NDArray[np.signedinteger[Any]]


@dataclass(frozen=True)
class Route:
    """Communication pattern that brings all queries and keys together; in most, keys and values travel.

    ``ring``: from neighbour to neighbour (Liu et al. 2023), and straight from the owner past ranks that do not need a
    block. ``bidirectional``: half of each block goes either way. ``double-ring``: around inner rings of ``inner`` ranks
    (a node), while a copy goes to the next node (LoongTrain, Gu et al. 2024). ``all-gather``: from the owner to every
    rank. ``pass-q``: queries travel, and partial results go to their owner (Yang et al. 2024, "Context Parallelism for
    Scalable Million-Token Inference"). With ``ulysses`` above one, groups of as many ranks first trade tokens for heads
    (Jacobs et al. 2023), and the route runs between groups (USP, Fang and Zhao 2024).
    """

    name: RouteName = "ring"
    inner: int = 1
    ulysses: int = 1

    @staticmethod
    def parse(text: str, ranks: int) -> "Route":
        """Read one of ``ROUTE_FORMS``; UnsupportedError if unknown or of a size that does not divide the ranks."""
        if not is_a(text, str):
            raise UnsupportedError(
                f"route must be text, got {described(text)}; choose one of {ROUTE_FORMS}"
            )
        first, _, between = text.partition("+")
        name, _, number = first.partition(":")
        if number and not (number.isdecimal() and int(number)):
            raise UnsupportedError(
                f"cannot read the route {text!r}: {number!r} is not a positive number"
            )
        if name == "ulysses":
            size = int(number or ranks)
            if ranks % size:
                raise UnsupportedError(
                    f"route {text!r}: groups of {size} do not divide {ranks} ranks, but must"
                )
            inner = Route.parse(between or "ring", ranks // size)
            if inner.ulysses > 1:
                raise UnsupportedError(
                    f"route {text!r}: ulysses stands once, at the beginning; use 'ulysses:U+ROUTE'"
                )
            return Route(inner.name, inner.inner, size)
        if (
            between
            or name not in ROUTE_NAMES
            or bool(number) != (name == "double-ring")
        ):
            raise UnsupportedError(
                f"unknown route {text!r}; choose one of {ROUTE_FORMS}"
            )
        if name != "double-ring":
            return Route(name)  # pyright: ignore[reportArgumentType]
        if ranks % int(number):
            raise UnsupportedError(
                f"route {text!r}: inner rings of {number} do not divide {ranks} ranks, but must"
            )
        return Route("double-ring", int(number))

    @property
    def passes_queries(self) -> bool:
        return self.name == "pass-q"

    @property
    def carries_latents(self) -> bool:
        """True if keys and values of all heads travel, so that the latents they are expanded from can instead."""
        return not self.passes_queries and self.ulysses == 1

    @property
    def backward(self) -> "Route":
        """The backward pass's route: keys and values are sent, as each rank has its out and lse."""
        return replace(self, name="ring") if self.passes_queries else self

    def check_sent_as(self, sent: Codec) -> None:
        """Raise UnsupportedError for encoded keys and values on a route that sends queries."""
        if self.passes_queries and not sent.is_exact:
            raise UnsupportedError(
                f"{sent.option} is for keys and values, which stay where they are on the route pass-q; "
                "use 'exact'"
            )

    def itineraries(self, ranks: int) -> Iterator["Itinerary"]:
        """Yield candidate paths; the schedule takes the one that sends fewer tokens."""
        match self.name:
            case "ring" | "pass-q":
                for direction in (1, -1):
                    yield _ring(ranks, direction, hands_on=self.name == "ring")
            case "bidirectional":
                yield _bidirectional(ranks)
            case "double-ring":
                yield _double_ring(ranks, self.inner)
            case "all-gather":
                yield _all_gather(ranks)


@dataclass(frozen=True)
class Itinerary:
    """Place of every block, at every hop of every rank.

    ``owner`` and ``source`` (H, N): a rank's block at a hop, and its sender. ``posted`` (H,): the earlier hop at whose
    start it is sent. ``behind`` (H,): the hop whose visitor passes this hop's visitor its result for the block (dk and
    dv; partials, of queries), or 0. ``half`` (H,): half of the owner's tokens, -1 for all.
    """

    owner: IntArray
    source: IntArray
    posted: IntArray
    behind: IntArray
    half: IntArray

    @cached_property
    def visitor(self) -> IntArray:
        """Rank that has an owner's block at a hop, inverse to ``owner``. Shape (H, N)."""
        visitor = np.empty_like(self.owner)
        visitor[np.arange(len(visitor))[:, None], self.owner] = np.arange(
            visitor.shape[1]
        )
        return visitor

    @cached_property
    def following(self) -> tuple[int, ...]:
        """The hop whose visitor gets each hop's visitor's result, or 0: inverse to ``behind``."""
        behind: list[int] = self.behind.tolist()
        later = [0] * len(behind)
        # Backwards, so that the first of several wins.
        for hop in range(len(behind) - 1, 0, -1):
            if behind[hop]:
                later[behind[hop]] = hop
        return tuple(later)

    @cached_property
    def sent_at(self) -> tuple[tuple[int, ...], ...]:
        """Later hops whose blocks are sent at the start of each hop."""
        posted: list[int] = self.posted.tolist()
        later: list[list[int]] = [[] for _ in posted]
        for hop in range(1, len(posted)):
            later[posted[hop]].append(hop)
        return tuple(map(tuple, later))


def _itinerary(ranks: int, hops: Sequence[tuple[IntArray, int, int, int]]) -> Itinerary:
    """Build an itinerary from hops 1 to H - 1, each (source of every rank, posted, ``behind``, half).

    The last three are as in ``Itinerary``. On a ring of 4, hop 2 is ``([3, 0, 1, 2], 1, 1, -1)``: every rank gets, from
    the rank before it, the whole block posted at hop 1, and the gradient of hop 1's rank.
    """
    everyone = np.arange(ranks, dtype=np.int32)  # 32 bits, as there are N^2
    owners = [everyone]
    for source, posted, _, _ in hops:
        # A rank receives the block that its source held at the hop at which the message was posted.
        owners.append(owners[posted][source])
    posted, behind, half = (
        np.array([first, *(hop[i] for hop in hops)])
        for i, first in ((1, 0), (2, 0), (3, -1))
    )
    source = np.stack(
        [everyone, *(hop[0] for hop in hops)], dtype=np.int32, casting="same_kind"
    )
    return Itinerary(np.stack(owners), source, posted, behind, half)


def _ring(ranks: int, direction: int, hands_on: bool) -> Itinerary:
    # A block is sent on one hop after it arrives, and so is its result so far: one message of each kind per hop.
    source = (np.arange(ranks) - direction) % ranks
    return _itinerary(
        ranks,
        [(source, hop - 1, hop - 1 if hands_on else 0, -1) for hop in range(1, ranks)],
    )


def _bidirectional(ranks: int) -> Itinerary:
    """Send first halves up the ring (odd hops), second halves down (even hops)."""
    # A half is at each rank every second hop, so both directions of a link are busy and each message has two hops.
    neighbours = [(np.arange(ranks) + step) % ranks for step in (1, -1)]
    hops = range(1, 2 * ranks - 1)
    return _itinerary(
        ranks,
        [
            (neighbours[hop % 2], max(hop - 2, 0), max(hop - 2, 0), 1 - hop % 2)
            for hop in hops
        ],
    )


def _double_ring(ranks: int, inner: int) -> Itinerary:
    """Send a block that enters a node around it, and at once to the next node."""
    node, place = np.divmod(np.arange(ranks), inner)
    neighbour = node * inner + (place - 1) % inner
    other_node = (np.arange(ranks) - inner) % ranks
    hops = [
        # A whole turn of the inner ring hides one message between nodes: it is posted ``inner`` hops ahead. No gradient
        # is handed over that link hop by hop; each node sends its sum home.
        (neighbour, hop - 1, hop - 1, -1)
        if hop % inner
        else (other_node, hop - inner, 0, -1)
        for hop in range(ranks)
    ]
    return _itinerary(ranks, hops[1:])


def _all_gather(ranks: int) -> Itinerary:
    # Everything is posted at hop 0, and no rank passes blocks on: partial gradients go straight to the owner.
    return _itinerary(
        ranks, [((np.arange(ranks) - hop) % ranks, 0, 0, -1) for hop in range(1, ranks)]
    )


class Heads(NamedTuple):
    queries: slice
    keys: slice


def member_heads(num_heads: int, num_kv_heads: int, members: int) -> tuple[Heads, ...]:
    """Split the query heads evenly, with their key/value heads (shared if few); UnsupportedError if uneven."""
    if num_heads % members or (num_kv_heads % members and members % num_kv_heads):
        raise UnsupportedError(
            f"route ulysses: {num_heads} query and {num_kv_heads} key/value heads do not split evenly over groups of "
            f"{members} ranks; choose a group size that divides the query heads and divides, or is a multiple of, "
            "the key/value heads"
        )
    shares: list[Heads] = []
    for member in range(members):
        # Fewer key/value heads than members: neighbours share one, as the query heads of one group are neighbours.
        first = member * num_kv_heads // members
        each = max(1, num_kv_heads // members)
        queries = num_heads // members
        shares.append(
            Heads(
                slice(member * queries, (member + 1) * queries),
                slice(first, first + each),
            )
        )
    return tuple(shares)

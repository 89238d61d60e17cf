"""One rank's part of a recurrence: its spans, their pieces and messages."""

import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch.distributed as dist

from ringspan.core.geometry.layout import CustomLayout, Layout
from ringspan.core.geometry.tree import Tree
from ringspan.core.recurrence import spans

Starts = tuple[int, ...] | Tree
"""First tokens of a sequence's documents, or its tree."""


@dataclass(frozen=True)
class LocalPiece:
    """Local tokens ``start`` to ``stop - 1`` of one document; ``continues``: it takes state from the span before."""

    start: int
    stop: int
    continues: bool


class Plan:
    def __init__(self, layout: Layout, starts: tuple[tuple[int, ...], ...]) -> None:
        self.layout, self.starts = layout, starts
        self.places = spans.places_of(layout)
        self._loans: dict[int, tuple[spans.Loan, ...]] = {}

    @cached_property
    def links(self) -> spans.Links:
        return spans.links_of(self.places, self.starts)

    @cached_property
    def rounds(self) -> spans.Rounds:
        return spans.scan_rounds(self.links)

    @cached_property
    def reverse_rounds(self) -> spans.Rounds:
        return spans.scan_rounds(self.links.reverse)

    def loans(self, width: int) -> tuple[spans.Loan, ...]:
        if width not in self._loans:
            self._loans[width] = spans.halo_loans(self.places, width, self.starts)
        return self._loans[width]

    def mine(self, rank: int) -> tuple[int, ...]:
        held = [
            (place.offset, number)
            for number, place in enumerate(self.places)
            if place.rank == rank
        ]
        return tuple(number for _, number in sorted(held))

    def rows(self) -> list[tuple[slice, tuple[int, ...]]]:
        """Return the sequences with the same documents, and where these begin."""
        if len(self.starts) == 1:
            return [(slice(None), self.starts[0])]
        return [(slice(row, row + 1), starts) for row, starts in enumerate(self.starts)]

    def pieces(self, number: int, starts: tuple[int, ...]) -> Iterator[LocalPiece]:
        place = self.places[number]
        for offset, count, begins in spans.pieces_of(place, starts):
            first = place.offset + offset
            yield LocalPiece(first, first + count, number > 0 and not begins)

    def is_entered(
        self, number: int, piece: LocalPiece, starts: tuple[int, ...]
    ) -> bool:
        """Return whether a piece's document, or a cache's text, has tokens before the first span."""
        place = self.places[number]
        before = starts[bisect_right(starts, place.start) - 1]
        return piece.start == place.offset and (
            before < self.places[0].start or not self.places[0].start
        )

    def passes(self, number: int, starts: tuple[int, ...]) -> bool:
        return spans.passes(self.places, number, starts)

    def reach_back(self, number: int, width: int, starts: tuple[int, ...]) -> int:
        return spans.reach_back(self.places, number, width, starts)

    def is_taken(self, number: int) -> bool:
        """Return whether the next span takes the state after this one."""
        return number + 1 < len(self.places) and self.links.takes[number + 1]

    def takes(self, number: int) -> bool:
        return self.links.takes[number]


class TreePlan(Plan):
    """Plan of a tree, whose spans lie in one segment each."""

    def __init__(self, layout: Layout, tree: Tree) -> None:
        super().__init__(layout, ((),))
        self.places, self._before = spans.branches_of(layout, tree)
        self._taken = frozenset(self._before)

    @cached_property
    def rounds(self) -> spans.Rounds:
        return spans.branch_rounds(self._before)

    @cached_property
    def reverse_rounds(self) -> spans.Rounds:
        return spans.branch_rounds(self._before, reverse=True)

    def loans(self, width: int) -> tuple[spans.Loan, ...]:
        if width not in self._loans:
            self._loans[width] = tuple(
                spans.branch_loans(self.places, self._before, width)
            )
        return self._loans[width]

    def pieces(self, number: int, starts: tuple[int, ...]) -> Iterator[LocalPiece]:
        place = self.places[number]
        yield LocalPiece(place.offset, place.offset + place.tokens, self.takes(number))

    def passes(self, number: int, starts: tuple[int, ...]) -> bool:
        return self.takes(number)

    def reach_back(self, number: int, width: int, starts: tuple[int, ...]) -> int:
        return sum(loan.tokens for loan in self.loans(width) if loan.target == number)

    def is_taken(self, number: int) -> bool:
        return number in self._taken

    def takes(self, number: int) -> bool:
        return self._before[number] >= 0


@lru_cache(maxsize=64)
def plan_of(layout: Layout, starts: tuple[Starts, ...]) -> Plan:
    # A batch with a tree has a single sequence.
    if isinstance(starts[0], Tree):
        return TreePlan(layout, starts[0])
    return Plan(layout, tuple(row for row in starts if not isinstance(row, Tree)))


def as_text(
    layout: Layout, starts: tuple[Starts, ...], group: dist.ProcessGroup | None
) -> str:
    name = layout.spec if isinstance(layout, CustomLayout) else layout.name
    return json.dumps(
        [
            name,
            layout.length,
            layout.ranks,
            starts,
            "" if group is None else group.group_name,
        ]
    )


@lru_cache(maxsize=64)
def from_text(text: str) -> tuple[Plan, str]:
    name, length, ranks, starts, group = json.loads(text)
    layout = (
        CustomLayout.parse(name)
        if name.startswith("custom")
        else Layout(name, length, ranks)
    )
    is_tree = isinstance(starts[0][0], list)
    return plan_of(
        layout,
        tuple(Tree(*map(tuple, row)) if is_tree else tuple(row) for row in starts),
    ), group

"""Layouts: which rank holds each position, and where."""

# S global tokens, N ranks, T = padded S / N tokens per rank. A position is an index into the global sequence.

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import chain, starmap
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.core.errors import LayoutError
from ringspan.core.messages.numbers import described, integer, is_a
from ringspan.core.names import LAYOUT_NAMES, LayoutName, find_name


def layout_name(name: str) -> LayoutName:
    if not is_a(name, str):
        raise LayoutError(
            f"a layout's name must be one of {', '.join(LAYOUT_NAMES)}, got {described(name)}"
        )
    return find_name("layout", name, LAYOUT_NAMES, LayoutError)


# A named tuple, since layouts may have thousands and a data class is slow to construct and to hash.
class Span(NamedTuple):
    """An arithmetic run of positions: ``start, start + step, ..., start + (count - 1) * step``."""

    start: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    step: int = 1

    @property
    def positions(self) -> NDArray[np.int64]:
        return self.start + self.step * np.arange(self.count, dtype=np.int64)


@dataclass(frozen=True)
class Layout:
    """Positions that each rank of a ring holds.

    ``contiguous``: rank r holds ``[r T, (r + 1) T)``. ``striped`` (Brandon et al. 2023): ``r, r + N, ...``.
    ``zigzag``: chunks r and 2N - 1 - r of 2N. The last two balance causal work. Padding follows ``length``, up to
    ``padded_length``; no key there is attended to. With ``members`` above one, each of ``ranks`` is a Ulysses group.

    Raises:
        LayoutError: an unknown name, or a length or number of ranks that is not an integer of at least one.
    """

    name: LayoutName
    length: int
    ranks: int
    members: int = 1

    def __post_init__(self) -> None:
        layout_name(self.name)
        for name in ("length", "ranks", "members"):
            # numpy's integers too become int: they would not do as a cache's key or an operator's argument.
            number = integer(getattr(self, name), name, LayoutError, at_least=1)
            object.__setattr__(self, name, number)

    @cached_property
    def fingerprint(self) -> str:
        """Short identity that ranks compare, without the length."""
        return self.name

    @property
    def granularity(self) -> int:
        """Divisor of the padded length: 2N for zigzag (two equal chunks a device), else N."""
        return self.ranks * self.members * (2 if self.name == "zigzag" else 1)

    @property
    def padded_length(self) -> int:
        return -(-self.length // self.granularity) * self.granularity

    @property
    def tokens_per_rank(self) -> int:
        return self.padded_length // self.ranks

    def tokens_of(self, rank: int) -> int:
        """Return one rank's tokens, including padding."""
        return self.tokens_per_rank

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Return one rank's spans in storage order, adjacent ones joined; LayoutError for another rank."""
        rank = integer(rank, "rank", LayoutError)
        if not 0 <= rank < self.ranks:
            raise LayoutError(
                f"rank {rank} is not in a layout of {self.ranks} ranks; give 0 to {self.ranks - 1}"
            )
        tokens = self.tokens_per_rank
        if self.name == "contiguous":
            return (Span(rank * tokens, tokens),)
        if self.name == "striped":
            return (Span(rank, tokens, self.ranks),)
        chunk = tokens // 2
        # Chunks r and 2N - 1 - r: an early one that sees little and a late one that sees much.
        # Four ranks hold 0 7, 1 6, 2 5 and 3 4; 3 and 4 are adjacent and so one span.
        mirrored = 2 * self.ranks - 1 - rank
        if mirrored == rank + 1:
            return (Span(rank * chunk, tokens),)
        return (Span(rank * chunk, chunk), Span(mirrored * chunk, chunk))

    def grouped(self, members: int) -> "Layout":
        """Return the same positions over N / members groups of consecutive (striped: every N / members-th) ranks."""
        return Layout(self.name, self.length, self.ranks // members, members)

    def group_ranks(self, group: int) -> tuple[int, ...]:
        """Return the ranks of a group of this grouped layout, in the order of ``places``."""
        if self.name == "striped":
            return tuple(range(group, self.ranks * self.members, self.ranks))
        return tuple(range(group * self.members, (group + 1) * self.members))

    def places(self, member: int) -> tuple[slice, ...]:
        """Return a member's tokens in its group's storage: one slice, or two equal ones (zigzag)."""
        whole = self.tokens_per_rank
        each = whole // self.members
        if self.name == "striped":
            return (slice(member, whole, self.members),)
        if self.name == "contiguous":
            return (slice(member * each, (member + 1) * each),)
        # The members of a group hold its first chunk from its start on, and its mirrored chunk from its end back.
        chunk = each // 2
        return (
            slice(member * chunk, (member + 1) * chunk),
            slice(whole - (member + 1) * chunk, whole - member * chunk),
        )

    def positions(self, rank: int) -> NDArray[np.int64]:
        """Return one rank's positions (T,) in storage order; those from ``length`` on are padding."""
        return np.concatenate([span.positions for span in self.spans(rank)])

    @cached_property
    def permutation(self) -> NDArray[np.int64]:
        """``padded[permutation]`` concatenates the ranks' shards. Shape (padded_length,)."""
        return np.concatenate([self.positions(rank) for rank in range(self.ranks)])

    @cached_property
    def inverse(self) -> NDArray[np.int64]:
        """``concatenated_shards[inverse]`` is the padded sequence. Shape (padded_length,)."""
        return np.argsort(self.permutation)


def _of_whole_numbers(run: Span) -> Span:
    return Span(
        *(
            integer(number, f"the {name} of a run", LayoutError)
            for name, number in run._asdict().items()
        )
    )


def _wrong(start: int, count: int, step: int, end: int) -> str:
    """Say what is wrong with a run, given the end of the run before it."""
    if count < 1:
        return f"a run of {count} positions at {start}; each needs at least one"
    if step != 1:
        return (
            f"a run from {start} in steps of {step}; runs are of consecutive positions"
        )
    if start < 0:
        return f"a run from {start}, which is before the sequence; positions start at 0"
    return f"positions {start} to {min(end, start + count) - 1} in two runs; each may be in one"


@dataclass(frozen=True)
class CustomLayout(Layout):
    """Any runs of consecutive positions per rank, in storage order; construct with ``of``.

    ``CustomLayout.of([[(0, 3), (10, 2)], [(3, 5)]])``: rank 0 holds 0, 1, 2, 10, 11 and rank 1 holds 3 to 7. Those from
    ``length`` on are padding; those that no rank holds, 8 and 9, do not exist: ``ring_attention`` allows that, but not
    ``shard`` and ``unshard``. ``ring_attention`` and ``unshard`` need equally many tokens on every rank.

    Raises:
        LayoutError: no rank; an empty run or one with a step; a negative position, or one in two runs.
    """

    parts: tuple[tuple[Span, ...], ...] = ()

    @staticmethod
    def of(
        parts: Iterable[Iterable[tuple[int, int]]], length: int | None = None
    ) -> "CustomLayout":
        """Build a layout of ``length`` tokens (None: up to the last held) from each rank's runs (start, count).

        LayoutError if these are not such a list, or as the class.
        """
        try:
            spans = tuple(tuple(starmap(Span, runs)) for runs in parts)
        except TypeError as error:
            raise LayoutError(
                "a custom layout takes a list of runs (start, count) for each rank, as in [[(0, 8)], [(8, 8)]], "
                f"got {described(parts)}"
            ) from error
        # A cache builds a layout for every token; its runs are integers already, so skip the conversion.
        if not {int}.issuperset(
            map(type, chain.from_iterable(chain.from_iterable(spans)))
        ):
            spans = tuple(tuple(map(_of_whole_numbers, held)) for held in spans)
        if length is None:
            length = max(
                (span.start + span.count for held in spans for span in held), default=0
            )
        return CustomLayout("custom", length, len(spans), parts=spans)  # pyright: ignore[reportArgumentType]

    @property
    def spec(self) -> str:
        """Text that ``parse`` reads; equal layouts have equal texts."""
        parts = "/".join(
            ",".join(f"{span.start}+{span.count}" for span in held)
            for held in self.parts
        )
        return f"custom:{self.length}:{parts}"

    @staticmethod
    @lru_cache(maxsize=64)
    def parse(text: str) -> "CustomLayout":
        """Parse a ``spec``."""
        _, length, parts = text.split(":")
        runs = (
            [run.split("+") for run in held.split(",") if run]
            for held in parts.split("/")
        )
        return CustomLayout.of(
            ([(int(start), int(count)) for start, count in held] for held in runs),
            int(length),
        )

    @cached_property
    def fingerprint(self) -> str:
        return f"custom {sha256(self.spec.encode()).hexdigest()[:16]}"

    @cached_property
    def _hash(self) -> int:
        return hash((self.length, self.parts))

    # Hashed once, since there may be thousands of runs and caches ask for every layer.
    def __hash__(self) -> int:
        return self._hash

    def __post_init__(self) -> None:
        """Raise LayoutError for the first run, by position, that is empty, stepped, negative or overlapping."""
        object.__setattr__(self, "length", integer(self.length, "length", LayoutError))
        if not self.parts or self.length < 1:
            raise LayoutError(
                f"a layout needs at least one rank and one token, got {len(self.parts)} and {self.length}"
            )
        # There may be thousands of runs, so they are checked as an array of (start, count, step), by start.
        numbers = chain.from_iterable(chain.from_iterable(self.parts))
        spans = np.fromiter(numbers, np.int64).reshape(-1, 3)
        spans = spans[spans[:, 0].argsort(kind="stable")]
        ends = np.concatenate(([0], spans[:, 0] + spans[:, 1]))
        wrong = np.flatnonzero(
            (spans[:, 1] < 1) | (spans[:, 2] != 1) | (spans[:, 0] < ends[:-1])
        )
        if wrong.size:
            start, count, step = spans[wrong[0]].tolist()
            raise LayoutError(
                f"a custom layout has {_wrong(start, count, step, int(ends[wrong[0]]))}"
            )

    @property
    def granularity(self) -> int:
        return 1

    @property
    def padded_length(self) -> int:
        return sum(map(self.tokens_of, range(self.ranks)))

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of each rank; LayoutError if they differ."""
        counts = {self.tokens_of(rank) for rank in range(self.ranks)}
        if len(counts) > 1:
            raise LayoutError(
                f"the ranks of this layout hold {min(counts)} to {max(counts)} tokens; equal ones are needed"
            )
        return counts.pop()

    def tokens_of(self, rank: int) -> int:
        return sum(span.count for span in self.spans(rank))

    def spans(self, rank: int) -> tuple[Span, ...]:
        rank = integer(rank, "rank", LayoutError)
        if not 0 <= rank < self.ranks:
            raise LayoutError(
                f"rank {rank} is not in a layout of {self.ranks} ranks; give 0 to {self.ranks - 1}"
            )
        return self.parts[rank]

    def grouped(self, members: int) -> Layout:
        if members == 1:
            return self
        raise LayoutError(
            "a custom layout has no Ulysses groups; use a route without them"
        )

    def positions(self, rank: int) -> NDArray[np.int64]:
        return np.concatenate(
            [np.empty(0, np.int64), *(span.positions for span in self.spans(rank))]
        )
